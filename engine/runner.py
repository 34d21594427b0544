"""One rank of the engine: loads the model, owns the KV pool, and runs step plans.

On the leader a step plan is sent to the followers first, then every rank runs the same batch, and the leader samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from ..kernels.cores import give_way
from ..proto.errors import ConfigError
from ..proto.kv_layout import KVLayout, block_count
from ..text.grammar import Vocabulary
from ..text.source import resolve
from ..text.tokenizer import Tokenizer
from .batch import BatchTensors
from .guide import Guide
from .model import Model
from .model_config import ModelConfig, load_config
from .paged_kv import DTYPES, KV_DTYPES, PagedKV, bytes_per_block
from .params import EngineParams
from .partition import head_ranges
from .prompt_scores import take_scores
from .ranks import RankGroup
from .sampler import sample
from .step import DRAWN_BY_LEADER, Kind, OnLayers, SampledToken, SequenceStep, pack_plan
from .verify import accept, draws_of
from .weights import Weights

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_MODEL_DTYPES = ("float32", "bfloat16")


class Runner:
    """A loaded model with its KV pool. Steps come from one thread; transfer threads use `kv` meanwhile.

    `broadcast` sends a packed plan to all followers; None on followers and where there are none. Raises ConfigError
    for anything that cannot run here, as far as possible before the weights are read.
    """

    ahead = 0  # steps that `decode_ahead` queues before they are asked for

    def __init__(
        self,
        params: EngineParams,
        group: RankGroup,
        progress: Callable[[int, int], None],
        broadcast: Callable[[bytes], None] | None,
    ) -> None:
        _check(params)
        torch.set_num_threads(params.threads)
        give_way(params.threads)
        source = resolve(params.model_path)
        self.config = load_config(source)
        dtype = DTYPES[params.dtype]
        weights = Weights.open(
            source, self.config, dtype, params.quantization, group.rank, params.tensor_parallel, progress
        )
        self.max_model_len = _max_model_len(params, self.config)
        self.layout = _layout(params, self.config, weights.fingerprint)
        self.blocks = _pool_blocks(params, self.layout)
        self.kv = self._make_pool(group.rank)
        plan = weights.memory_plan()
        _log.info(
            "rank %d of %d on %s: %d thread(s), %s; weights %.0f MiB (loading %.0f); %d %s KV blocks of %d tokens",
            *(group.rank, params.tensor_parallel, params.device, torch.get_num_threads(), params.dtype),
            *(plan.resident / 2**20, plan.peak / 2**20, self.blocks, self.layout.dtype, params.block_size),
        )
        if block_count(self.max_model_len, params.block_size) > self.blocks:
            _log.warning(
                "the KV pool holds %d tokens, less than the context of %d: longer requests are refused",
                self.blocks * params.block_size,
                self.max_model_len,
            )
        self.guide = Guide(lambda: Vocabulary(Tokenizer.load(source)))
        self._load(weights, params, group)
        self._broadcast = broadcast

    def _make_pool(self, rank: int) -> PagedKV:
        return PagedKV(self.layout, rank, self.blocks, _CPU)

    def _load(self, weights: Weights, params: EngineParams, group: RankGroup) -> None:
        self._model = Model(self.config, weights, params, group)

    @property
    def vocab_size(self) -> int:
        """Rows of the logits."""
        return self.config.vocab_size

    def prefill(self, steps: Sequence[SequenceStep], on_layers: OnLayers | None) -> list[list[SampledToken]]:
        """Run chunks of prompts. `on_layers(lo, hi)`: the KV of these layers of all the chunks is in the pool; None:
        nobody waits for it.

        Returns, for each step with a draw and in their order, one token for each of its choices; for a step with
        proposals the tokens that its only choice goes on with, one at least. `SequenceStep.scores` are filled in.
        """
        return self._lead("prefill", steps, on_layers)

    def decode(self, steps: Sequence[SequenceStep]) -> list[list[SampledToken]]:
        """Run one step of running sequences; the same as `prefill` without interest in the layers."""
        return self._lead("decode", steps, None)

    def decode_ahead(self, steps: Sequence[SequenceStep]) -> list[list[SampledToken]]:
        """The same for a batch that goes on. A row may be empty: that step is queued, behind one that was queued before
        this was called, and is to be asked for again.

        Where `ahead` is not 0, the next step of each sequence may be queued before it is asked for, if its blocks have
        room for `ahead` more tokens; one that is never asked for has no effect but that its KV is written. Any other
        call ends that.
        """
        return self.decode(steps)

    def follow(self, kind: Kind, steps: Sequence[SequenceStep], on_layers: OnLayers) -> None:
        """Run a plan of the leader on another rank."""
        self._forward(steps, on_layers if kind == "prefill" else None)

    def warm_up(self) -> float:
        """Run one token through every kernel and collective; returns the seconds of a second such step.

        Uses block 0, so only before the pool is in use. The steps bear an empty request id.
        """
        draw = DRAWN_BY_LEADER
        step = SequenceStep("", 0, 0, [0], 0, [0], draw)
        self._lead("prefill", [step], None)
        started = time.perf_counter()
        self.decode([step])
        return time.perf_counter() - started

    def _lead(self, kind: Kind, steps: Sequence[SequenceStep], on_layers: OnLayers | None) -> list[list[SampledToken]]:
        allowed = self.guide.begin(steps)
        if self._broadcast is not None:
            self._broadcast(pack_plan(kind, steps))
        logits = self._forward(steps, on_layers)
        draws = [draw for step in steps for draw in draws_of(step)]
        with torch.inference_mode():
            logits = take_scores(steps, logits)
            return accept(steps, sample(logits, draws, allowed.result() if allowed else {}))

    def _forward(self, steps: Sequence[SequenceStep], on_layers: OnLayers | None) -> torch.Tensor:
        with torch.inference_mode():
            batch = BatchTensors.build(steps, self.layout.block_size, _CPU)
            return self._model.forward(batch, self.kv, on_layers)


def _check(params: EngineParams) -> None:
    """What can be refused before anything is read."""
    if params.dtype not in _MODEL_DTYPES:
        raise ConfigError(f"model.dtype: {params.dtype!r} is not one of {', '.join(_MODEL_DTYPES)}")
    if params.quantization != "none" and params.dtype != "bfloat16":
        raise ConfigError(f"model.quantization: {params.quantization} needs model.dtype bfloat16, not {params.dtype}")
    if params.kv_dtype not in ("auto", *KV_DTYPES):
        raise ConfigError(f"kv.dtype: {params.kv_dtype!r} is not one of auto, {', '.join(KV_DTYPES)}")
    check_device(params.device)
    for name in ("threads", "block_size", "layer_group", "tensor_parallel"):
        if getattr(params, name) < 1:
            raise ConfigError(f"{name}: {getattr(params, name)} must be at least 1")


def check_device(device: str) -> None:
    """Raises ConfigError for a device that is not here."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is not available here (no GPU, or a torch build without CUDA); use cpu")


def _max_model_len(params: EngineParams, config: ModelConfig) -> int:
    wanted = params.max_model_len
    if wanted is None:
        return config.max_positions
    if not 1 <= wanted <= config.max_positions:
        raise ConfigError(f"max_model_len: {wanted} is outside 1..{config.max_positions}, the context of the model")
    return wanted


def _layout(params: EngineParams, config: ModelConfig, fingerprint: str) -> KVLayout:
    return KVLayout(
        fingerprint=fingerprint,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope=config.rope.describe(),
        dtype=params.dtype if params.kv_dtype == "auto" else params.kv_dtype,
        block_size=params.block_size,
        head_ranges=head_ranges(config.kv_heads, params.tensor_parallel),
    )


def _pool_blocks(params: EngineParams, layout: KVLayout) -> int:
    """Blocks of the pool: the same number on all ranks, so the rank with the most heads decides."""
    if params.kv_blocks is not None:
        if params.kv_blocks < 1:
            raise ConfigError(f"kv_blocks: {params.kv_blocks} must be at least 1")
        return params.kv_blocks
    largest = max(bytes_per_block(layout, rank) for rank in range(layout.tensor_parallel))
    blocks = params.kv_bytes // largest
    if blocks < 1:
        raise ConfigError(f"kv.memory: {params.kv_bytes} bytes hold no block; one takes {largest}")
    return blocks
