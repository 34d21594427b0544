"""What a placement policy is given and what it answers. Policies are pure: they draw only from the `rng` they get."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

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


class Candidate(NamedTuple):
    """A ready worker, as far as this router knows it."""

    peer: Peer
    outstanding: int  # tokens: of prompts to compute, or of KV that its sequences may come to hold
    works: Collection[Work] = ()  # of which they are the sum
    cached: int = 0  # leading tokens of the leg whose KV it holds
    law: StepTime | None = None  # of its steps, by its own account
    step_tokens: int = 1  # prompt tokens that one of its steps computes at most
    distance: float = 1.0  # seconds a byte of KV from its prefill worker, as a multiple of the least for any worker


class Candidates(Sequence[Candidate]):
    """Candidates that are made when a policy looks at them, since some look at two of a thousand."""

    def __init__(self, count: int, make: Callable[[int], Candidate], outstanding: Callable[[], Sequence[int]]) -> None:
        self._count = count
        self._make = make
        self._made: dict[int, Candidate] = {}
        self.outstanding = outstanding  # of each, known without making it

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> list[Candidate]: ...

    def __getitem__(self, place: int | slice) -> Candidate | list[Candidate]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        known = self._made.get(place)
        if known is None:
            if not 0 <= place < self._count:
                raise IndexError(place)
            known = self._made[place] = self._make(place)
        return known


class Choice(NamedTuple):
    """The worker, and how far behind its objective the leg is predicted to be there: 0 when it keeps it."""

    peer: Peer
    late_s: float = 0.0


class Policy(Protocol):
    """Picks one of at least one candidates."""

    uses_prefixes: bool  # whether `Candidate.cached` makes a difference, so that it need be known
    uses_distances: bool  # whether `Candidate.distance` does
    uses_laws: bool  # whether `Candidate.law` does

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The worker for the leg."""
        ...


def least(costs: Sequence[float], candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The cheapest candidate; ties at random, so that equals share evenly."""
    lowest = min(costs)
    return candidates[rng.choice([place for place, cost in enumerate(costs) if cost == lowest])]


def outstanding(candidates: Sequence[Candidate]) -> Sequence[int]:
    """Of each."""
    if isinstance(candidates, Candidates):
        return candidates.outstanding()
    return [candidate.outstanding for candidate in candidates]
