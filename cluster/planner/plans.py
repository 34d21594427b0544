"""A plan: pools with their sizes, what they are expected to do, and whether that is what was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .costs import CostModel
from .estimate import METHOD_TPOT, METHOD_TTFT, Aggregated, Decode, Latency, Prefill, exposed_s
from .queueing import SHARES
from .workload import Slo, Workload

Kind = Literal["disaggregated", "aggregated"]
_NONE = dict.fromkeys(SHARES, math.inf)


@dataclass(frozen=True)
class Plan:
    """Workers of both pools. Of an aggregated plan `prefill` and `replicas[0]` are not used."""

    kind: Kind
    prefill: CostModel
    decode: CostModel
    replicas: tuple[int, int]
    workload: Workload
    slo: Slo

    # ---- size ---------------------------------------------------------------------------------------------------

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        prompts = self.replicas[0] * self.prefill.tp if self.kind == "disaggregated" else 0
        return prompts + self.replicas[1] * self.decode.tp

    @property
    def dollars_hour(self) -> float | None:
        """None: the profile has no price."""
        price = self.decode.hardware.price
        return None if price is None else price * self.gpus

    # ---- what it does -------------------------------------------------------------------------------------------

    @cached_property
    def exposed(self) -> float:
        """Seconds from the first token to the KV's arrival."""
        if self.kind == "aggregated":
            return 0.0
        return exposed_s(self.prefill, self.decode, self.workload, self.replicas)

    @cached_property
    def prompts(self) -> Prefill | Aggregated:
        """Who computes prompts."""
        if self.kind == "aggregated":
            return Aggregated(self.decode, self.workload, self.replicas[1])
        return Prefill(self.prefill, self.workload, self.replicas[0])

    @cached_property
    def answers(self) -> Decode:
        """Who generates."""
        if isinstance(self.prompts, Aggregated):
            return self.prompts.decode
        return Decode(self.decode, self.workload, self.replicas[1], self.exposed)

    @cached_property
    def ttft(self) -> Latency:
        """Seconds from the request to its first token."""
        fits = self.kind == "aggregated" or self.prefill_fits
        return self.prompts.ttft() if fits else Latency(math.inf, _NONE, METHOD_TTFT)

    @cached_property
    def tpot(self) -> Latency:
        """Seconds per token after the first."""
        return self.answers.tpot() if math.isfinite(self.exposed) else Latency(math.inf, _NONE, METHOD_TPOT)

    @property
    def prefill_fits(self) -> bool:
        """Whether the longest prompt fits in a prefill worker's pool."""
        held = self.prefill.kv_blocks * self.prefill.options.block_size
        return held >= self.workload.prompt.most

    @cached_property
    def binding(self) -> str | None:
        """What the hardware refuses, whatever the limits say; None: nothing."""
        if self.kind == "disaggregated":
            if not self.prefill_fits:
                return "KV memory of the prefill workers"
            if not math.isfinite(self.exposed):
                return "the network between the pools"
        if self.prompts.queue.utilisation >= 1:
            return "prefill throughput"
        return self.answers.binding

    @cached_property
    def attained(self) -> float:
        """Share of requests within the strictest limits of TTFT and TPOT at once; their delays taken as independent."""
        if self.binding is not None:
            return 0.0
        first = self.prompts.ttft_within(min(self.slo.ttft.values())) if self.slo.ttft else 1.0
        return first * (self.answers.tpot_within(min(self.slo.tpot.values())) if self.slo.tpot else 1.0)

    @cached_property
    def misses(self) -> list[str]:
        """What is not as asked for, in words; empty: all is."""
        found = [] if self.binding is None else [f"{self.binding} is not enough"]
        for name, limits, latency in (("TTFT", self.slo.ttft, self.ttft), ("TPOT", self.slo.tpot, self.tpot)):
            for share, limit in limits.items():
                took = latency.percentiles[share]
                if took > limit:
                    found.append(f"{name} p{share * 100:.0f} is {_seconds(took)}, more than {_seconds(limit)}")
        if self.slo.attainment is not None and self.attained < self.slo.attainment:
            found.append(f"{self.attained:.1%} of requests are within both limits, less than {self.slo.attainment:.1%}")
        return found

    @cached_property
    def meets(self) -> bool:
        """Whether nothing is missed; without the percentiles themselves, so that a search can ask often."""
        if self.binding is not None or (self.slo.attainment is not None and self.attained < self.slo.attainment):
            return False
        first = all(self.prompts.ttft_within(limit) >= share for share, limit in self.slo.ttft.items())
        return first and all(self.answers.tpot_within(limit) >= share for share, limit in self.slo.tpot.items())

    @property
    def goodput_gpu(self) -> float:
        """Requests a second and GPU that are within both limits."""
        return self.workload.busiest * self.attained / self.gpus

    @property
    def output_tokens(self) -> float:
        """A second, at the mean rate."""
        return self.workload.rate * self.workload.output.mean

    def dollars_million(self, output_only: bool) -> float | None:
        """Dollars for a million tokens, prompt and output or output only, at the mean rate."""
        if self.dollars_hour is None or self.workload.rate <= 0:
            return None
        each = self.workload.output.mean + (0 if output_only else self.workload.prompt.mean)
        return self.dollars_hour / 3600 / (self.workload.rate * each) * 1e6


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "unbounded"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
