"""The cheapest plan that meets the limits, over kind, tensor parallelism of each pool, and replicas.

Exhaustive in kind and degrees; replicas by bisection, as more workers of a pool never make its latencies worse. With
limits that no number of workers meets, the nearest that one idle worker does meet are planned for, and that is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...proto.errors import ConfigError
from .costs import CostModel
from .plans import Kind, Plan
from .setup import Site
from .workload import Slo, Workload

_SLACK = 1.02  # a limit that is relaxed to what is possible, by so much more


@dataclass(frozen=True, slots=True)
class Found:
    """The best of each kind; None: there is none with the GPUs allowed. `relaxed`: the limits that were planned for
    where those asked for cannot be met at all, with what is impossible in words."""

    disaggregated: Plan | None
    aggregated: Plan | None
    slo: Slo
    relaxed: Slo
    impossible: list[str]
    tried: int

    @property
    def best(self) -> Plan | None:
        """The cheaper one; the aggregated one where they cost the same, as it has less that can fail."""
        plans = [plan for plan in (self.aggregated, self.disaggregated) if plan is not None]
        return min(plans, key=lambda plan: (plan.gpus, plan.kind != "aggregated")) if plans else None


class Search:
    """Over the plans of one site. `gpus`: at most, in both pools."""

    def __init__(self, site: Site, gpus: int, degrees: Sequence[int]) -> None:
        heads, node = site.shape.heads, site.hardware.node
        usable = sorted({tp for tp in degrees if tp <= min(heads, node, gpus)})
        if not usable:
            raise ConfigError(
                f"plan.tensor_parallel: none of {', '.join(map(str, degrees))} is possible with {heads} query heads, "
                f"{node} GPUs in a node and plan.gpus {gpus}"
            )
        self._prefill = {tp: site.cost("prefill", tp) for tp in usable}
        self._decode = {tp: site.cost("decode", tp) for tp in usable}
        self.gpus = gpus
        self.tried = 0

    def run(self, workload: Workload, slo: Slo) -> Found:
        """Raises ConfigError for a workload that is no number, or a model that fits on no worker."""
        _check(workload, slo)
        self._check_memory(workload)
        relaxed, impossible = self._possible(workload, slo)
        found = {kind: self.cheapest(kind, workload, relaxed) for kind in ("disaggregated", "aggregated")}
        return Found(found["disaggregated"], found["aggregated"], slo, relaxed, impossible, self.tried)

    def cheapest(self, kind: Kind, workload: Workload, slo: Slo) -> Plan | None:
        """Of the plans of a kind that meet the limits: the fewest GPUs, then the most requests within them."""
        best: Plan | None = None

        def room() -> int:
            return self.gpus if best is None else best.gpus

        for plan in self._candidates(kind, workload, slo, room):
            if best is None or (plan.gpus, -plan.attained) < (best.gpus, -best.attained):
                best = plan
        return best

    def all_plans(self, kind: Kind, workload: Workload, slo: Slo, most: int) -> Iterator[Plan]:
        """Every plan with at most `most` replicas in a pool, met or not: what `cheapest` must agree with."""
        for prefill, decode in self._pairs(kind):
            firsts = range(1, most + 1) if kind == "disaggregated" else (0,)
            for first, second in itertools.product(firsts, range(1, most + 1)):
                yield Plan(kind, prefill, decode, (first, second), workload, slo)

    def affordable(self, kind: Kind, workload: Workload, slo: Slo, gpus: int) -> Iterator[Plan]:
        """Every plan of at most so many GPUs whose workers are not fewer than their work, whatever its latencies."""
        for prefill, decode in self._pairs(kind):
            least = Plan(kind, prefill, decode, (1, 1), workload, slo)
            first = math.floor(least.prompts.queue.utilisation) + 1
            second = math.floor(least.answers.sharing.utilisation) + 1
            if kind == "aggregated":
                for count in range(first, gpus // decode.tp + 1):
                    yield Plan(kind, prefill, decode, (0, count), workload, slo)
                continue
            for prompts in range(first, (gpus - second * decode.tp) // prefill.tp + 1):
                for answers in range(second, (gpus - prompts * prefill.tp) // decode.tp + 1):
                    yield Plan(kind, prefill, decode, (prompts, answers), workload, slo)

    def _pairs(self, kind: Kind) -> Iterator[tuple[CostModel, CostModel]]:
        if kind == "aggregated":
            yield from ((model, model) for model in self._decode.values())
        else:
            yield from itertools.product(self._prefill.values(), self._decode.values())

    def _candidates(self, kind: Kind, workload: Workload, slo: Slo, limit: Callable[[], int]) -> Iterator[Plan]:
        for prefill, decode in self._pairs(kind):
            if kind == "aggregated":
                found = self._fewest(limit() // decode.tp, self._plan(kind, prefill, decode, workload, slo, None))
                if found is not None:
                    yield found
                continue
            first, room = 1, limit()
            enough = self._fewest_prompts(prefill, decode, workload, slo, room)
            while enough is not None and (first := max(first, enough)) * prefill.tp + decode.tp <= limit():
                most = (limit() - first * prefill.tp) // decode.tp
                found = self._fewest(most, self._plan(kind, prefill, decode, workload, slo, first))
                if found is not None:
                    yield found
                    if slo.attainment is None and found.replicas[1] == 1:
                        break
                first += 1 if found is None or first < 16 else max(1, first // 16)

    def _plan(
        self, kind: Kind, prefill: CostModel, decode: CostModel, workload: Workload, slo: Slo, first: int | None
    ) -> Callable[[int], Plan]:
        return lambda second: Plan(kind, prefill, decode, (first or 0, second), workload, slo)

    def _fewest_prompts(
        self, prefill: CostModel, decode: CostModel, workload: Workload, slo: Slo, room: int
    ) -> int | None:
        """Prefill workers that TTFT needs by itself, beside as many decode workers as there is room for."""
        only = replace(slo, tpot={}, attainment=None)

        def good(first: int) -> bool:
            self.tried += 1
            plan = Plan("disaggregated", prefill, decode, (first, max(1, room // decode.tp)), workload, only)
            fits = plan.prefill_fits and plan.prompts.queue.utilisation < 1
            return fits and all(plan.prompts.ttft_within(limit) >= share for share, limit in only.ttft.items())

        return _least(good, room // prefill.tp)

    def _fewest(self, most: int, plan: Callable[[int], Plan]) -> Plan | None:
        def good(count: int) -> bool:
            self.tried += 1
            return plan(count).meets

        count = _least(good, most)
        return None if count is None else plan(count)

    def _possible(self, workload: Workload, slo: Slo) -> tuple[Slo, list[str]]:
        """The limits, with those raised that even an idle cluster misses."""
        idle = workload.at(1e-9)
        plans = [
            Plan(kind, prefill, decode, (1, 1), idle, slo)
            for kind in ("disaggregated", "aggregated")
            for prefill, decode in self._pairs(kind)
        ]
        plans = [plan for plan in plans if plan.binding is None]
        relaxed, impossible = {}, []
        for name in ("ttft", "tpot"):
            asked: dict[float, float] = getattr(slo, name)
            relaxed[name] = dict(asked)
            for share, limit in asked.items():
                least = min((getattr(plan, name).percentiles[share] for plan in plans), default=math.inf)
                if least > limit:
                    relaxed[name][share] = least * _SLACK
                    impossible.append(
                        f"{name.upper()} p{share * 100:.0f} below {limit * 1000:g} ms: one idle worker needs "
                        f"{least * 1000:.1f} ms with any tensor parallelism allowed, so no number of workers helps"
                    )
        return replace(slo, ttft=relaxed["ttft"], tpot=relaxed["tpot"]), impossible

    def _check_memory(self, workload: Workload) -> None:
        """Some worker must hold the weights and the longest request."""
        needed = workload.prompt.most + workload.output.most
        most = max(model.kv_blocks * model.options.block_size for model in self._decode.values())
        if most < needed:
            room = max(model.kv_room for model in self._decode.values())
            missing = f"{-room / 1e9:.1f} GB are missing for the weights" if room < 0 else f"{most} tokens fit"
            raise ConfigError(
                f"plan.tensor_parallel: no worker can hold the model and one request of {needed:.0f} tokens: {missing}"
                "; allow more ranks, quantise the weights (plan.weights), or name hardware with more memory"
            )

    def capacity(self, plan: Plan) -> float:
        """The highest rate of the busiest window, in requests a second, that this plan serves within its limits."""
        low, high = 0.0, max(plan.workload.busiest, 1e-3)

        def good(rate: float) -> bool:
            self.tried += 1
            return replace(plan, workload=plan.workload.at(rate)).meets

        while good(high) and high < 1e7:
            low, high = high, high * 2
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if good(middle) else (low, middle)
        return low

    def within_gpus(self, workload: Workload, slo: Slo) -> Plan | None:
        """The plan with the highest rate that the GPUs allowed can serve; None: none serves anything."""
        low, high, best = 0.0, workload.busiest, None
        for _ in range(12):
            middle = (low + high) / 2
            plans = [self.cheapest(kind, workload.at(middle), slo) for kind in ("disaggregated", "aggregated")]
            found = [plan for plan in plans if plan is not None]
            low, high = (middle, high) if found else (low, middle)
            best = min(found, key=lambda plan: plan.gpus) if found else best
        return best


def _check(workload: Workload, slo: Slo) -> None:
    """Numbers that are none must not become plans. No load at all (a rate of 0) is a load: one worker of each kind."""
    numbers = {"workload.rate": workload.rate, "workload.peak": workload.peak}
    for key, value in numbers.items():
        if value is None or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{key}: is {value}, but must be a number of at least 0")
    for name, limits in (("ttft", slo.ttft), ("tpot", slo.tpot)):
        for limit in limits.values():
            if not limit > 0:
                raise ConfigError(f"slo.{name}: is {limit}, but must be more than 0")


def _least(good: Callable[[int], bool], most: int) -> int | None:
    """The smallest count from 1 to `most` that is good, if the good ones are all those from some count on."""
    low, high = 0, 1
    while high < most and not good(high):
        low, high = high, min(high * 2, most)
    if most < 1 or not good(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
