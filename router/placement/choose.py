"""The policies by name, and what holds for all of them: preferred and avoided workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..life_messages import Peer
from .latency_aware import LatencyAwareDecode, LatencyAwarePrefill
from .least_loaded import LeastLoaded
from .policy import Candidate, Choice, Demand, Policy
from .power_of_two import PowerOfTwo
from .prefix_aware import PrefixAwareDecode, PrefixAwarePrefill
from .round_robin import RoundRobin
from .session_affinity import SessionAffinity
from .transfer_aware import TransferAware


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper limits in seconds; None: there is none."""

    ttft_s: float | None
    tpot_s: float | None


PREFILL: dict[str, Callable[[Objectives], Policy]] = {
    "round_robin": lambda _: RoundRobin(),
    "power_of_two": lambda _: PowerOfTwo(),
    "least_loaded": lambda _: LeastLoaded(),
    "prefix_aware": lambda _: PrefixAwarePrefill(),
    "session_affinity": lambda _: SessionAffinity(),
    "latency_aware": lambda objectives: LatencyAwarePrefill(objectives.ttft_s),
}
DECODE: dict[str, Callable[[Objectives], Policy]] = {
    **PREFILL,
    "prefix_aware": lambda _: PrefixAwareDecode(),
    "latency_aware": lambda objectives: LatencyAwareDecode(objectives.tpot_s),
    "transfer_aware": lambda _: TransferAware(),
}


def choose(
    policy: Policy,
    demand: Demand,
    candidates: Sequence[Candidate],
    rng: random.Random,
    *,
    prefer: Peer | None,
    avoid: Collection[Peer],
    may_use_avoided: bool,
) -> Choice | None:
    """The worker for a leg: `prefer` when it is ready, else the policy's choice; None when there is none."""
    if prefer is not None and prefer not in avoid and any(candidate.peer == prefer for candidate in candidates):
        return Choice(prefer)
    if not avoid:
        return policy.choose(demand, candidates, rng) if candidates else None
    fresh = [candidate for candidate in candidates if candidate.peer not in avoid]
    usable = fresh if fresh or not may_use_avoided else candidates
    return policy.choose(demand, usable, rng) if usable else None
