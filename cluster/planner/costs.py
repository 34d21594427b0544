"""What a step costs: one additive law for the planner, the simulator, routers and workers.

`CostModel.prefill_law` and `.decode_law` are laws of `proto/step_time.py`; where `baton calibrate` measured this
model on this machine they are its fits, else they follow from sizes and the hardware profile, term by term:

    prefill   t0 + [2 * P * N + 2 * L * h * d * sum(n * (n + 2s))] / (T * F * mfu)
              + 2L * [r * ring(N * hidden * 2 B) + r' * ring(its bytes beyond 32 MiB)]
    decode    m * (weights + context * kv) / (T * W) + k * 2 * P * b / (T * F)
              + 2L * all_reduce(b * hidden * 2 B) + L * x + L * log2(T) * y + b * z

P: active parameters, L: layers, h * d: query heads * head size, T: ranks, F: FLOP/s, W: bytes/s, N: tokens of a step, n
of a prompt after s that are there already, b: sequences. The matrix term is Kaplan et al. 2020 (2 FLOPs a parameter
and token), the attention term half of 4 * L * h * d * n^2 as queries see only what is before them (Narayanan et al.
2021).
Decode adds its terms and does not take the largest: kernels of a step run one after the other, each bound by one thing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

from ...engine.partition import head_ranges
from ...proto.step_time import StepTime
from ..hardware import Hardware, Measured
from .all_reduce import all_reduce_s, ring_s
from .model_shape import Shape

WIDTH = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_SCALE = {"int8": 4 / 64, "fp8": 0.0, "int4": 4 / 32}  # bytes of scales for each quantised parameter
LARGE = 32 * 2**20  # bytes from which on an all-reduce takes more for each of them
_BATCH = 32  # sequences, likewise for decode
_BOUND_S = 0.35e9  # bytes a rank keeps for collectives (AIConfigurator: .34 to .39 GB of NCCL)


@dataclass(frozen=True, slots=True)
class Options:
    """How the engine runs the model. Bytes; shares of 1."""

    weights: str = "bfloat16"  # of WIDTH
    kv: str = "bfloat16"
    block_size: int = 16  # tokens
    max_batch_tokens: int = 8192
    max_sequences: int = 256
    memory_share: float = 0.9
    reserve: float = 1e9
    kv_memory: float | None = None  # of a rank's pool; None: what the rank has left
    layer_group: int = 4  # layers whose KV is sent together
    link: float | None = None  # bytes/s that KV travels with, per rank; None: the profile's network
    wire: float = 1.0  # bytes on the wire / bytes in the pool
    spec_tokens: int = 0  # guesses in a step; 0: no speculation
    spec_accepted: float = 0.6
    spec_cost: float = 0.05  # of a guess, in steps of one sequence


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds of a step by what they are spent on."""

    weights: float = 0.0
    kv: float = 0.0
    compute: float = 0.0
    attention: float = 0.0
    all_reduce: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def bottleneck(self) -> str:
        """The largest one's name."""
        return max((field.name for field in fields(self)), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class CostModel:
    """A worker of `tp` ranks. `measured`: the calibration of this very model and degree, if there is one."""

    shape: Shape
    hardware: Hardware
    tp: int
    options: Options = Options()
    measured: Measured | None = None

    # ---- sizes --------------------------------------------------------------------------------------------------

    @cached_property
    def weight_bytes(self) -> float:
        """Of all ranks. Embedding and head keep 16 bits where the layers are quantised."""
        shape, kind = self.shape, self.options.weights
        ends = shape.vocab_size * shape.hidden * (1 if shape.tied else 2)
        return (shape.total - ends) * self._weight_width + ends * max(WIDTH[kind], 2.0)

    @property
    def _weight_width(self) -> float:
        return WIDTH[self.options.weights] + _SCALE.get(self.options.weights, 0.0)

    @property
    def kv_token_bytes(self) -> float:
        """KV of one token of one copy: 2 * layers * KV heads * head size * bytes; codes carry a float32 scale a row."""
        kind = self.options.kv
        row = self.shape.head_dim * WIDTH[kind] + (4 if WIDTH[kind] == 1 else 0)
        return self.shape.kv_elements / self.shape.head_dim * row

    @cached_property
    def kv_rank_bytes(self) -> float:
        """KV of one token on the fullest rank: whole heads, and where ranks outnumber them each holds one."""
        if self.shape.latent:
            return self.kv_token_bytes  # latent vectors are not split
        most = max(stop - start for start, stop in head_ranges(self.shape.kv_heads, self.tp))
        return self.kv_token_bytes * most / self.shape.kv_heads

    @cached_property
    def kv_blocks(self) -> int:
        """Blocks of KV: (share * memory - weights / T - activations - collectives - reserve) / bytes of a block.

        0 where the weights alone do not fit. PagedAttention's accounting (Kwon et al. 2023).
        """
        block = self.options.block_size * self.kv_rank_bytes
        if self.options.kv_memory is not None:
            return int(self.options.kv_memory // block)
        return max(0, int(self.kv_room // block))

    @property
    def kv_room(self) -> float:
        """Bytes of a rank that are left for KV; negative: so many are missing."""
        options, memory = self.options, float(self.hardware.memory)
        held = self.weight_bytes / self.tp + self.activation_bytes + options.reserve
        return options.memory_share * memory - held - (_BOUND_S if self.tp > 1 else 0.0)

    @property
    def activation_bytes(self) -> float:
        """Of the largest step: a few rows of the hidden size and one of the MLP for each token, and logits."""
        shape, options = self.shape, self.options
        width = min(shape.intermediate * shape.active_experts + shape.shared_intermediate, 8 * shape.hidden)
        rows = options.max_batch_tokens * (6 * shape.hidden + 2 * width / self.tp) * 2
        return rows + options.max_sequences * shape.vocab_size / self.tp * 4

    # ---- prefill ------------------------------------------------------------------------------------------------

    @property
    def flops(self) -> float:
        """Of one rank, in the type that the products run in (weight-only formats compute in 16 bits)."""
        special = {"fp8": self.hardware.fp8_flops, "int8": self.hardware.int8_flops}.get(self.options.weights)
        return float(special or self.hardware.flops) * (0.5 if self.options.weights == "float32" else 1.0)

    def prefill_terms(self, new_tokens: float, cached_tokens: float = 0.0, batch: int = 1) -> Terms:
        """`batch` prompts together, each of `new_tokens` behind `cached_tokens` that are there already."""
        shape, fit = self.shape, self.hardware.efficiency
        tokens, squares = batch * new_tokens, batch * new_tokens * (new_tokens + 2 * cached_tokens)
        if self.measured is not None:
            law, steps = self.prefill_law, self._steps(tokens)
            return Terms(compute=law.b * tokens, attention=law.c * squares, overhead=law.a * steps)
        rate = self.tp * self.flops * fit.mfu
        exact = self.tp * float(self.hardware.flops) * fit.mfu  # attention is not quantised
        steps = self._steps(tokens)
        return Terms(
            weights=(steps - 1) * self._read_s(self.options.max_batch_tokens),
            compute=2 * (shape.active - shape.vocab_size * shape.hidden) * tokens / rate,
            attention=2 * shape.layers * shape.heads * shape.head_dim * squares / exact,
            all_reduce=steps * 2 * shape.layers * self._prefill_reduce_s(tokens / steps),
            overhead=steps * fit.prefill_s,
        )

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0.0, batch: int = 1) -> float:
        """Seconds, alone on the worker; see `prefill_terms`."""
        return self.prefill_terms(new_tokens, cached_tokens, batch).total

    def _prefill_reduce_s(self, tokens: float) -> float:
        """One all-reduce of a prefill step: what goes beyond 32 MiB was measured to be slower again (`fitting.py`)."""
        size, fit = tokens * self.shape.hidden * 2, self.hardware.efficiency
        beyond = fit.all_reduce_large * ring_s(max(0.0, size - LARGE), self.tp, self._link)
        return fit.all_reduce * ring_s(size, self.tp, self._link) + beyond

    @cached_property
    def _prompts(self) -> dict[tuple[tuple[float, ...], float], list[Terms]]:
        return {}

    def prompts(self, lengths: tuple[float, ...], cached_share: float) -> list[Terms]:
        """Of prompts of these lengths, of which a prefix cache holds this share; kept, as a search asks often."""
        key = (lengths, cached_share)
        if key not in self._prompts:
            self._prompts[key] = [
                self.prefill_terms(max(1.0, n * (1 - cached_share)), n * cached_share) for n in lengths
            ]
        return self._prompts[key]

    @cached_property
    def prefill_law(self) -> StepTime:
        """a + b * tokens + c * squares, `proto/step_time.py`."""
        if self.measured is not None:
            fit = self.measured.prefill
            return StepTime(fit.a, fit.b, fit.c)
        terms = self.prefill_terms(1.0)
        return StepTime(self.hardware.efficiency.prefill_s, terms.compute + terms.all_reduce, terms.attention)

    def _steps(self, tokens: float) -> int:
        return max(1, math.ceil(tokens / self.options.max_batch_tokens))

    # ---- decode -------------------------------------------------------------------------------------------------

    def decode_terms(self, sequences: float, context_tokens: float) -> Terms:
        """One step of so many sequences that hold `context_tokens` together."""
        if self.measured is not None:
            law = self.decode_law
            return Terms(compute=law.b * sequences, kv=law.c * context_tokens, overhead=law.a)
        shape, fit, width = self.shape, self.hardware.efficiency, self.tp
        bandwidth, rows = float(self.hardware.bandwidth), sequences * (1 + self.options.spec_tokens)
        reduced = all_reduce_s(rows * shape.hidden * 2, width, self._link, self.hardware.all_reduce)
        layer = fit.layer_s + math.log2(width) * fit.rank_s
        return Terms(
            weights=self._read_s(rows),
            kv=fit.memory * context_tokens * self.kv_rank_bytes / bandwidth,
            compute=fit.compute * 2 * shape.active * rows / (width * self.flops),
            all_reduce=2 * shape.layers * reduced,
            overhead=shape.layers * layer + sequences * fit.sequence_s,
        )

    def decode_step_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds; see `decode_terms`."""
        return self.decode_terms(sequences, context_tokens).total

    @cached_property
    def decode_law(self) -> StepTime:
        """a + b * sequences + c * context: the terms through 1 and 32 sequences, exact for dense models on one rank."""
        if self.measured is not None:
            fit = self.measured.decode
            return StepTime(fit.a, fit.b, fit.c)
        one, many = self.decode_step_s(1, 0), self.decode_step_s(_BATCH, 0)
        slope = max(0.0, (many - one) / (_BATCH - 1))
        return StepTime(max(0.0, one - slope), slope, self.decode_terms(0, 1).kv)

    @property
    def tokens_per_step(self) -> float:
        """Of one sequence: 1 + p + ... + p^guesses with speculation (Leviathan et al. 2023, equation 1)."""
        p, guesses = self.options.spec_accepted, self.options.spec_tokens
        return float(sum(p**i for i in range(guesses + 1)))

    @cached_property
    def token_law(self) -> StepTime:
        """The decode law for a token instead of a step: the same without speculation."""
        options, law = self.options, self.decode_law
        if not options.spec_tokens:
            return law
        guessing = 1 + options.spec_cost * options.spec_tokens
        return StepTime(*(coefficient * guessing / self.tokens_per_step for coefficient in law))

    def _read_s(self, tokens: float) -> float:
        """The weights that a step of so many tokens reads, by one rank."""
        read = self.shape.touched(tokens) / (self.shape.total - self.shape.looked_up)
        kept = self.shape.looked_up * max(WIDTH[self.options.weights], 2.0)
        size = (self.weight_bytes - kept) * read
        return self.hardware.efficiency.memory * size / (self.tp * float(self.hardware.bandwidth))

    @property
    def _link(self) -> float:
        return float(self.hardware.link or self.hardware.network)

    # ---- transfer -----------------------------------------------------------------------------------------------

    def transfer_bytes(self, tokens: float, to_tp: int | None = None) -> float:
        """What goes over the wire: heads that several receiving ranks hold are sent to each of them."""
        ranks = self.tp if to_tp is None else to_tp
        copies = 1 if self.shape.latent else max(1, math.ceil(ranks / self.shape.kv_heads))
        return tokens * self.kv_token_bytes * copies * self.options.wire

    def bandwidth_to(self, to_tp: int | None = None) -> float:
        """Bytes/s between two workers: as many links side by side as the smaller has ranks."""
        if self.measured is not None and self.measured.transfer is not None:
            return float(self.measured.transfer.bandwidth)
        each = float(self.options.link or self.hardware.network)
        return each * min(self.tp, self.tp if to_tp is None else to_tp)

    @property
    def message_s(self) -> float:
        """Of one message, whatever its size (11 to 20 us a layer were measured elsewhere)."""
        if self.measured is not None and self.measured.transfer is not None:
            return self.measured.transfer.alpha_s
        return self.hardware.network_latency + 15e-6 * min(self.options.layer_group, self.shape.layers)

    @property
    def groups(self) -> int:
        """Messages of one chunk: groups of layers; one where what they leave behind was measured as a whole."""
        if self.measured is not None and self.measured.transfer is not None:
            return 1
        return max(1, math.ceil(self.shape.layers / self.options.layer_group))

    def transfer_s(self, tokens: float, computed_s: float = 0.0, load: float = 0.0, to_tp: int | None = None) -> float:
        """Seconds from the prompt's end to its KV in the other pool.

        N messages, each computed in p = computed_s / N and moved in x: max(x, N x - (N - 1) p), or all at the end where
        that is sooner (short prompts: N latencies cost more than they hide). `load`: share of the link that other
        transfers take; a link is shared, so x grows by 1 / (1 - load) (processor sharing).
        """
        parts = self.groups * self._steps(tokens)
        moved = self.transfer_bytes(tokens, to_tp) / self.bandwidth_to(to_tp) / max(1e-9, 1 - load)
        if self.measured is not None and self.measured.transfer is not None:
            return self.message_s + moved
        each = self.message_s + moved / parts
        layered = max(each, parts * each - (parts - 1) * computed_s / parts)
        return min(layered, self.message_s + moved)

    # ---- the same, otherwise ------------------------------------------------------------------------------------

    def with_options(self, **changes: object) -> CostModel:
        """Other options of the engine. A calibration holds for what it measured only: it is left out when they change
        what a step computes."""
        keeps = set(changes) <= {"max_batch_tokens", "max_sequences", "kv_memory", "layer_group", "link", "block_size"}
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        return replace(self, options=options, measured=self.measured if keeps else None)
