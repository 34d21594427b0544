"""What became of the simulated requests: a few numbers of each, kept as arrays, and what is made of them.

TTFT, TPOT and end to end are what a client sees of its own request, defined as in `bench_stats.py`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bench_stats import time_per_token
from .request import Flight

Limits = Mapping[str, Mapping[str, float]]  # metric ("ttft", "tpot") -> percentile name -> seconds
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Results:
    """The first `warm_up` requests are left out of the latencies."""

    def __init__(self, warm_up: int = 0) -> None:
        self._warm_up = warm_up
        self.sent_s, self.ended_s = array("d"), array("d")
        self._ttft, self._tpot, self._e2e = array("f"), array("f"), array("f")
        self._prompt, self._output = array("I"), array("I")
        self.all_refused = self.all_failed = self.all_too_long = 0
        self.preemptions = self.retries = self.on_decode = 0  # the last: whose decode worker computed the prompt
        self.hints_s = 0.0  # sum of the hints of those refused

    def served(self, flight: Flight) -> None:
        """A request has its whole answer."""
        if flight.number < self._warm_up or flight.first_at is None or flight.ended_at is None:
            return
        arrival, first, ended = flight.arrival, flight.first_at, flight.ended_at
        self.sent_s.append(arrival.at)
        self.ended_s.append(ended)
        self._ttft.append(first - arrival.at)
        each = time_per_token(first, ended, arrival.output - 1)
        self._tpot.append(each if each is not None else math.nan)
        self._e2e.append(ended - arrival.at)
        self._prompt.append(arrival.prompt)
        self._output.append(arrival.output)

    def refused(self, flight: Flight, hint_s: float) -> None:
        """It was not let in."""
        if flight.number >= self._warm_up:
            self.all_refused += 1
            self.hints_s += hint_s

    def too_long(self, flight: Flight) -> None:
        """No worker could hold it."""
        if flight.number >= self._warm_up:
            self.all_too_long += 1

    def failed(self, flight: Flight) -> None:
        """It was let in, and did not get its answer."""
        if flight.number >= self._warm_up:
            self.all_failed += 1

    def __len__(self) -> int:
        return len(self._ttft)

    @property
    def measured(self) -> int:
        """All that came."""
        return len(self) + self.all_refused + self.all_failed + self.all_too_long

    def values(self, metric: str) -> NDArray[np.float32]:
        """Of "ttft", "tpot" or "e2e", in order of ends; only those that are defined."""
        values = np.frombuffer({"ttft": self._ttft, "tpot": self._tpot, "e2e": self._e2e}[metric], dtype=np.float32)
        return values[~np.isnan(values)]

    def good(self, limits: Limits) -> float | None:
        """The share of requests that keep all p99 limits together, refused and failed ones counted; None: no limit,
        or no request. TPOT is kept where there is none."""
        strict = {metric: by["p99"] for metric, by in limits.items() if "p99" in by}
        if not strict or not self.measured:
            return None
        kept = np.ones(len(self), dtype=bool)
        for metric, limit in strict.items():
            values = np.frombuffer(self._ttft if metric == "ttft" else self._tpot, dtype=np.float32)
            kept &= ~(values > limit)
        return float(kept.sum()) / self.measured

    def summary(self, limits: Limits) -> dict[str, Any]:
        """All numbers as JSON values: seconds and per second. The window is from the first send to the last one."""
        sent, ended = np.frombuffer(self.sent_s), np.frombuffer(self.ended_s)
        result: dict[str, Any] = {
            "requests": {
                "measured": self.measured,
                "completed": len(self),
                "refused": self.all_refused,
                "failed": self.all_failed,
                "too_long": self.all_too_long,
                "preemptions": self.preemptions,
                "retries": self.retries,
            },
            **{f"{metric}_s": distribution(self.values(metric)) for metric in ("ttft", "tpot", "e2e")},
            "prompt_tokens": int(np.frombuffer(self._prompt, dtype=np.uint32).sum()),
            "output_tokens": int(np.frombuffer(self._output, dtype=np.uint32).sum()),
            "share_within_p99_limits": self.good(limits),
            "window_s": None,
            "throughput": {"requests_per_s": None, "output_tokens_per_s": None, "goodput_per_s": None},
        }
        length = float(sent.max() - sent.min()) if len(self) else 0.0
        if length > 0:
            within = int((ended <= sent.max()).sum())
            share = result["share_within_p99_limits"]
            result["window_s"] = length
            result["throughput"] = {
                "requests_per_s": within / length,
                "output_tokens_per_s": result["output_tokens"] / float(ended.max() - sent.min()),
                "goodput_per_s": None if share is None else share * self.measured / length,
            }
        return result


def distribution(values: NDArray[np.float32]) -> dict[str, float | int | None]:
    """count, mean and percentiles, linear between the two nearest values; None where there is no value."""
    if not len(values):
        return {"count": 0, "mean": None, **dict.fromkeys(SHARES, None)}
    found = np.quantile(values, list(SHARES.values()))
    return {
        "count": len(values),
        "mean": float(values.mean(dtype=np.float64)),
        **{name: float(value) for name, value in zip(SHARES, found, strict=True)},
    }
