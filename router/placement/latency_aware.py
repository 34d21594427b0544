"""Latency-aware: where the predicted latency is least, and how far behind its objective that is.

Predictions evaluate the law that each worker reports of its own steps (`proto/step_time.py`):

- TTFT at a prefill worker: the leg's own uncached part, and of each leg before it as much as runs before this one ends.
  The worker gives half of a step to the oldest prompt and half to the shortest, so a longer leg takes from a shorter
  one about the shorter one's own length.
- TPOT at a decode worker: a step with all its sequences and this one, at the KV that they may come to hold.

A worker that has reported no law yet counts as one that needs no time: it is tried, and has a law soon.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand, least


class LatencyAwarePrefill:
    """`objective_s`: of TTFT; None: there is none."""

    uses_prefixes = True
    uses_distances = False
    uses_laws = True

    def __init__(self, objective_s: float | None) -> None:
        self._objective_s = objective_s

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The least predicted TTFT; among equals (without laws) the least work."""
        costs = [predict_ttft_s(demand, candidate) for candidate in candidates]
        lowest = min(costs)
        equals = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == lowest]
        peer = least([candidate.outstanding - candidate.cached for candidate in equals], equals, rng).peer
        return Choice(peer, _late(lowest, self._objective_s))


class LatencyAwareDecode:
    """`objective_s`: of TPOT; None: there is none."""

    uses_prefixes = False
    uses_distances = False
    uses_laws = True

    def __init__(self, objective_s: float | None) -> None:
        self._objective_s = objective_s

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The least predicted TPOT; among equals (without laws) the least KV. What is late adds up over the answer."""
        costs = [predict_tpot_s(demand, candidate) for candidate in candidates]
        lowest = min(costs)
        equals = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == lowest]
        peer = least([candidate.outstanding for candidate in equals], equals, rng).peer
        return Choice(peer, _late(lowest, self._objective_s) * demand.output)


def predict_ttft_s(demand: Demand, candidate: Candidate) -> float:
    """TTFT of the leg at this prefill worker, in seconds; 0: it has no law yet."""
    if candidate.law is None:
        return 0.0
    fresh = demand.tokens - candidate.cached
    tokens, squares = float(fresh), float(demand.tokens**2 - candidate.cached**2)
    for work in candidate.works:
        part = min(1.0, fresh / work.tokens) if work.tokens else 0.0
        tokens += part * work.tokens
        squares += part * work.squares
    steps = max(1.0, tokens / candidate.step_tokens)
    return candidate.law.seconds((steps, tokens, squares))


def predict_tpot_s(demand: Demand, candidate: Candidate) -> float:
    """TPOT of the leg at this decode worker, in seconds; 0: it has no law yet."""
    if candidate.law is None:
        return 0.0
    sequences = demand.choices + sum(work.sequences for work in candidate.works)
    context = candidate.outstanding + demand.choices * (demand.tokens + demand.output)
    return candidate.law.seconds((1.0, float(sequences), float(context)))


def _late(predicted_s: float, objective_s: float | None) -> float:
    return max(0.0, predicted_s - objective_s) if objective_s is not None else 0.0
