"""A request on its way through the simulated cluster, and what the loaders and generators of workloads make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from ...decode_worker.scheduler import Sequence as Decoding
from ...proto.leg import Leg
from ...proto.leg import LegKey as WorkerLegKey
from ...proto.sampling import SamplingParams
from ...router.life_messages import LegKey, Peer
from ...router.outstanding import LegId


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload. `contents`: the prompt's tokens where they are known, so that prefixes can be found;
    equal numbers stand for equal tokens."""

    at: float
    prompt: int
    output: int
    contents: Sequence[int] | None = None
    session: str = ""


@lru_cache(maxsize=1 << 16)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={},
        seed=0,
        n=1,
        max_tokens=max_tokens,
        min_tokens=0,
        stop_token_ids=frozenset(),
        logprobs=None,
    )


@dataclass(slots=True, eq=False)
class Flight:
    """One request. Seconds of virtual time; `generated` tokens were said before the leg that runs now."""

    number: int
    arrival: Arrival
    leg_id: LegId
    leg: Leg
    attempt: int = 1
    generated: int = 0
    first_at: float | None = None
    ended_at: float | None = None
    prefill: Peer | None = None
    decode: Peer | None = None
    cached: int = 0  # tokens found there
    begun_at: float = 0.0  # computing
    ticket: bool = False  # the decode worker has reserved
    computed: bool = False  # the prefill worker holds all KV of the leg
    submitted: bool = False  # to the prefill worker
    joined: bool = False  # the decode worker has all KV
    tries: int = 1

    @property
    def here(self) -> bool:
        """Whether its decode worker computes the prompt."""
        return self.prefill is None and self.decode is not None


@dataclass(frozen=True, slots=True)
class Running:
    """A request in the batch of a decode worker. `sequence` is the scheduler's own, which counts its tokens."""

    flight: Flight
    sequence: Decoding
    table: list[int]

    @property
    def said(self) -> int:
        """Tokens of the answer."""
        return self.flight.generated + 1 + self.sequence.tokens - self.flight.leg.length


def leg_of(number: int, attempt: int, arrival: Arrival, generated: int, deadline: float) -> Leg:
    """As the workers know it; prompts of unknown contents are ranges, which cost nothing."""
    contents = arrival.contents
    prompt: Sequence[int]
    said: Sequence[int]
    tokens: Sequence[int]
    if contents is None:
        prompt, said, tokens = range(arrival.prompt), range(generated), range(arrival.prompt + generated)
    else:
        prompt, said = contents, [-1 - number] * generated if generated else []
        tokens = [*contents, *said] if generated else contents
    return Leg(
        (str(number), attempt, 0),
        (0,),
        cast(list[int], prompt),
        cast(list[int], said),
        cast(list[int], tokens),
        _sampling(arrival.output),
        deadline,
        "",
    )


def flight_of(number: int, arrival: Arrival, deadline: float) -> Flight:
    """A request that has just come."""
    return Flight(number, arrival, LegId(str(number), LegKey(1, 0)), leg_of(number, 1, arrival, 0, deadline))


def again(flight: Flight, generated: int) -> None:
    """The next attempt, with all that was said so far."""
    flight.attempt += 1
    flight.generated = generated
    flight.ticket = flight.computed = flight.submitted = flight.joined = False
    flight.leg_id = LegId(str(flight.number), LegKey(flight.attempt, 0))
    flight.leg = leg_of(flight.number, flight.attempt, flight.arrival, generated, flight.leg.deadline)


__all__ = ["Arrival", "Flight", "Running", "WorkerLegKey", "again", "flight_of", "leg_of"]
