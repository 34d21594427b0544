"""The arithmetic of inference by hand, as numbers: what a step must read and compute at least, and what follows.

Everything here is a limit at full bandwidth and full FLOP rate; `costs.py` says how much of it is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware import Hardware
from .costs import WIDTH, CostModel
from .model_shape import Shape

BATCHES = (1, 8, 32, 128)
CURVE_CONTEXT = 256  # tokens of each sequence on the batch curve
EXAMPLE = (2048, 32)  # tokens and sequences of the KV example
READER = 50.0  # tokens a second that a fast reader takes
TTFT_S, TPOT_S = 0.2, 0.025


@dataclass(frozen=True, slots=True)
class Roofline:
    """One rank's limits for a model whose weights are held in `kind`, with KV in `kv` (both of costs.WIDTH)."""

    shape: Shape
    hardware: Hardware
    kind: str
    kv: str

    @staticmethod
    def of(cost: CostModel) -> Roofline:
        """Of a cost model's model and machine."""
        return Roofline(cost.shape, cost.hardware, cost.options.weights, cost.options.kv)

    def weights(self, kind: str | None = None) -> float:
        """Bytes: parameters * bytes of one; scales of quantised weights add a few percent."""
        return self.shape.total * WIDTH[kind or self.kind]

    def single(self, kind: str | None = None) -> float:
        """Tokens/s of one stream at most: bandwidth / weight bytes."""
        return float(self.hardware.bandwidth) / self.weights(kind)

    @property
    def kv_token(self) -> float:
        """Bytes: 2 * layers * KV heads * head size * bytes of a value."""
        return self.shape.kv_elements * WIDTH[self.kv]

    @property
    def balance(self) -> float:
        """FLOPs that the machine computes while it reads one byte."""
        return float(self.hardware.flops) / float(self.hardware.bandwidth)

    @property
    def intensity(self) -> float:
        """FLOPs that decode does for each weight it reads: one product, one sum."""
        return 2.0

    def throughput(self, batch: int, context: int = CURVE_CONTEXT) -> float:
        """Tokens/s of a batch: batch / (weights / W + batch * context * kv / W); bytes add, they do not overlap."""
        read = self.weights() + batch * context * self.kv_token
        return batch * float(self.hardware.bandwidth) / read

    def bandwidth_for(self, tokens_s: float) -> float:
        """Bytes/s that one stream of so many tokens a second reads."""
        return tokens_s * self.weights()

    def most_sequences(self, context: int) -> int:
        """That fit beside the weights: (memory - weights) / (context * kv)."""
        return max(0, int((float(self.hardware.memory) - self.weights()) // (context * self.kv_token)))


@dataclass(frozen=True, slots=True)
class Training:
    """Bytes that training holds, in bfloat16 with Adam (Rajbhandari et al. 2020 count them)."""

    parameters: float

    @property
    def weights(self) -> float:
        """2 bytes each."""
        return 2 * self.parameters

    @property
    def gradients(self) -> float:
        """As many as the weights."""
        return 2 * self.parameters

    @property
    def adam(self) -> float:
        """Two moments, bfloat16."""
        return 4 * self.parameters

    @property
    def held(self) -> float:
        """Before activations."""
        return self.weights + self.gradients + self.adam

    @property
    def mixed(self) -> float:
        """With moments and a master copy of the weights in float32: 16 bytes a parameter."""
        return 16 * self.parameters

    def activations(self, low: bool) -> float:
        """Of a usual batch, as experience has it: 3.4 to 9.1 bytes a parameter and more (24 to 64 GB for 7B)."""
        return self.parameters * (24 / 7 if low else 64 / 7)


def end_to_end(ttft_s: float, tpot_s: float, tokens: float) -> tuple[float, float]:
    """(seconds, TPOT's share) of an answer: TTFT + TPOT * tokens. Strictly the first token is TTFT's: tokens - 1."""
    decoding = tpot_s * tokens
    return ttft_s + decoding, decoding / (ttft_s + decoding)
