"""From samples to a benchmark's numbers: pure.

All latencies are a request's own, whatever else ran in its batch, on one monotonic clock.
TTFT: from the send time to the first message that carries a token; the send time is the intended one in an open loop.
TPOT: `time_per_token`. ITL: the gap before each later message, shared by its tokens.
What is not defined (no token, one token, no time between tokens, no success) is None and is not counted. Failures are
counted, and are in no latency. Warm-up requests are in no latency either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def time_per_token(first_s: float, last_s: float, later: int) -> float | None:
    """TPOT: seconds from a request's first token to its last / the `later` tokens after the first. None where there
    are none, or all came at one moment: an interval of 0 was not seen, and would keep any limit."""
    return (last_s - first_s) / later if later > 0 and last_s > first_s else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Seconds of one monotonic clock."""

    sent_s: float  # intended in an open loop
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]  # (when, tokens), only messages with tokens
    prompt_tokens: int
    error: str  # its code; "" for success
    warm_up: bool
    asked: int = 0  # output tokens at most
    exposed_s: float | None = None  # from the end of the prompt's computing to its KV at the decode worker

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0][0] - self.sent_s if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first message."""
        if not self.arrivals:
            return None
        return time_per_token(self.arrivals[0][0], self.arrivals[-1][0], self.tokens - self.arrivals[0][1])

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [(now - before) / count for (before, _), (now, count) in pairs for _ in range(count)]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the ordered values, of which there is at least one."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Sequence[float]) -> dict[str, float | int | None]:
    """count, mean, p50, p90, p99; None where there is no value."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    shares = {name: percentile(ordered, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {"count": len(ordered), "mean": sum(ordered) / len(ordered), **shares}


def window(samples: Sequence[Sample]) -> tuple[float, float]:
    """The steady window: from the first measured send to the last one, before load falls off.

    Where all were sent at once, to the last end. The samples are not empty.
    """
    sends = [sample.sent_s for sample in samples if not sample.warm_up]
    start, end = min(sends), max(sends)
    last = max(sample.ended_s for sample in samples)
    return start, end if end - start > 0.5 * (last - start) else last


def summarise(samples: Sequence[Sample], limits: dict[str, dict[str, float]]) -> dict[str, Any]:
    """All numbers as JSON values, seconds. `limits`: metric ("ttft", "tpot") -> percentile name -> limit."""
    measured = [sample for sample in samples if not sample.warm_up]
    good = [sample for sample in measured if not sample.error]
    result: dict[str, Any] = {
        "requests": {
            "measured": len(measured),
            "completed": len(good),
            "failed": len(measured) - len(good),
            "errors": dict(Counter(sample.error for sample in measured if sample.error)),
            "warm_up": len(samples) - len(measured),
        },
        "ttft_s": distribution([value for sample in good if (value := sample.ttft_s) is not None]),
        "tpot_s": distribution([value for sample in good if (value := sample.tpot_s) is not None]),
        "itl_s": distribution([gap for sample in good for gap in sample.gaps_s]),
        "e2e_s": distribution([sample.ended_s - sample.sent_s for sample in good]),
        "output_tokens": sum(sample.tokens for sample in good),
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "window_s": None,
        "throughput": {"requests_per_s": None, "output_tokens_per_s": None},
        "slo": _slo(good, len(measured), limits),
    }
    if measured:
        start, end = window(samples)
        length = end - start
        result["window_s"] = length
        if length > 0:
            inside = [n for sample in samples for when, n in sample.arrivals if start <= when <= end]
            ended = [sample for sample in samples if not sample.error and start <= sample.ended_s <= end]
            result["throughput"] = {
                "requests_per_s": len(ended) / length,
                "output_tokens_per_s": sum(inside) / length,
            }
    return result


def _slo(good: Sequence[Sample], measured: int, limits: dict[str, dict[str, float]]) -> dict[str, Any] | None:
    """Which limits held, and the share of measured requests (failures included) within the p99 limits."""
    if not limits or not measured:
        return None
    held: dict[str, bool | None] = {}
    for metric, by_percentile in limits.items():
        values = sorted(v for sample in good if (v := getattr(sample, f"{metric}_s")) is not None)
        for name, limit in by_percentile.items():
            share = float(name.removeprefix("p")) / 100
            held[f"{metric}_{name}"] = percentile(values, share) <= limit if values else None
    strict = {metric: by_percentile["p99"] for metric, by_percentile in limits.items() if "p99" in by_percentile}
    within = [sample for sample in good if all(_meets(sample, metric, limit) for metric, limit in strict.items())]
    return {"limits_s": limits, "held": held, "share_within_p99_limits": len(within) / measured if strict else None}


def _meets(sample: Sample, metric: str, limit: float) -> bool:
    value = getattr(sample, f"{metric}_s")
    return value is None or value <= limit
