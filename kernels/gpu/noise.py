"""The noise of engine/sampler.py inside kernels: a function of (key, counter), from splitmix64."""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(values):
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014) on uint64."""
    values = (values ^ (values >> 30)) * _MIX_1
    values = (values ^ (values >> 27)) * _MIX_2
    return values ^ (values >> 31)


@triton.jit
def draw(weights, keys, counters):
    """argmax(weights / e), e exponential: float32 [N], with the noise (keys, counters), uint64 and int [N]."""
    bits = mix(keys + (counters.to(tl.uint64) + 1) * _GOLDEN)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    return tl.argmax(weights.to(tl.float64) / -tl.log(uniform), 0)
