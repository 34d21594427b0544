"""What a placement policy is given and what it answers. Policies are pure: they draw only from the `rng` they get."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...proto.step_time import StepTime
from ..life_messages import Peer
from ..outstanding import Work


@dataclass(frozen=True, slots=True)
class Demand:
    """A leg that wants a worker."""

    tokens: int  # prompt and generated ids
    output: int  # tokens that each choice may still get
    choices: int
    session: str  # legs of one session go to one worker, where the policy cares; "": of none


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready worker, as far as this router knows it."""

    peer: Peer
    outstanding: int  # tokens: of prompts to compute, or of KV that its sequences may come to hold
    works: Collection[Work] = ()  # of which they are the sum
    cached: int = 0  # leading tokens of the leg whose KV it holds
    law: StepTime | None = None  # of its steps, by its own account
    step_tokens: int = 1  # prompt tokens that one of its steps computes at most
    distance: float = (
        1.0  # seconds a byte of KV from the leg's prefill worker, as a multiple of the least for any worker
    )


class Choice(NamedTuple):
    """The worker, and how far behind its objective the leg is predicted to be there: 0 when it keeps it."""

    peer: Peer
    late_s: float = 0.0


class Policy(Protocol):
    """Picks one of at least one candidates."""

    uses_prefixes: bool  # whether `Candidate.cached` makes a difference, so that it need be known

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The worker for the leg."""
        ...


def least(costs: Sequence[float], candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The cheapest candidate; ties at random, so that equals share evenly."""
    lowest = min(costs)
    return rng.choice([candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == lowest])
