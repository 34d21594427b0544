"""SP-03: a decode worker's book under random requests, deliveries, failures and cancels."""

from __future__ import annotations

import random
from collections import Counter

from baton.proto import worker_pb2 as pb
from baton.proto.errors import TransferFailed
from baton.proto.leg import Leg, LegKey
from baton.tests.harness.legs_rig import BLOCK, DecodeBook, leg
from hypothesis import given, settings
from hypothesis import strategies as st


def fingerprint(book: DecodeBook) -> tuple[int, ...]:
    """What changes whenever something moves (SP-03)."""
    load = book.legs.load()
    return (load.steps, load.running, load.waiting, load.held_legs, load.preemptions, len(book.told))


class Walk:
    """A worker under random requests, deliveries, failures and cancels; preempted choices come back."""

    def __init__(self, rng: random.Random, book: DecodeBook, ranks: int) -> None:
        self.rng = rng
        self.book = book
        self.ranks = ranks
        self.live: dict[LegKey, Leg] = {}
        self.preempted: Counter[tuple[str, int]] = Counter()
        self.cancelled: set[str] = set()
        self._told = 0

    def arrive(self) -> None:
        """A new request, perhaps."""
        if self.rng.random() < 0.4:
            half = self.book.pool.total * BLOCK // 2
            length, more = self.rng.randint(1, half), self.rng.randint(2, half)
            choices = range(self.rng.choice([1, 1, 1, 2]) if length < 6 else 1)
            self.submit(leg(length, more, choices=choices, first=self.rng.choice([0, 0, 40])))

    def submit(self, one: Leg) -> None:
        self.live[one.key] = self.book.submit(one)

    def deliver(self, chance: float) -> None:
        """Transfers end well or badly."""
        for key in list(self.book.expected):
            if self.rng.random() < chance:
                self.book.arrive(self.live[key], self.ranks)
            elif self.rng.random() < 0.1 * (1 - chance):
                self.book.do(self.book.legs.receive_failed(key, TransferFailed("lost")))

    def cancel(self) -> None:
        """Somebody leaves, perhaps."""
        if self.live and self.rng.random() < 0.15:
            victim = self.rng.choice(list(self.live))
            self.cancelled.add(victim[0])
            one_choice = len(self.live[victim].choices) > 1 and self.rng.random() < 0.5
            legs = self.book.legs
            self.book.do(legs.end_choices(victim, [victim[2]]) if one_choice else legs.cancel(victim))

    def step(self) -> bool:
        """One turn of the worker; whether anything moved."""
        before = fingerprint(self.book)
        self.book.step()
        for event in self.book.told[self._told :]:
            if event.WhichOneof("event") == "preempted":
                self._resume(event.preempted)
        self._told = len(self.book.told)
        return fingerprint(self.book) != before

    def _resume(self, lost: pb.Preempted) -> None:
        one = self.live[lost.leg.request_id, lost.leg.attempt, lost.leg.first_choice]
        assert not one.generated, "a resumed leg was preempted again"
        name = (lost.leg.request_id, lost.choice)
        self.preempted[name] += 1
        steps = [step for body in self.book.of("tokens") for step in body.tokens]
        said = [step.token.token_id for step in steps if (step.request_id, step.token.choice) == name]
        length, most = len(one.prompt), one.sampling.max_tokens
        self.submit(leg(length, most, choices=(lost.choice,), generated=said, first=one.prompt[0]))

    def check(self) -> None:
        """Nothing is left, and every choice of every leg ended once."""
        load = self.book.legs.load()
        left = (load.running, load.waiting, load.held_legs, load.used_blocks)
        assert left == (0, 0, 0, 0), repr(self.book.legs)
        finished = self.book.finished()
        failed = {failure.leg.request_id for failure in self.book.of("failed")}
        assert max(finished.values(), default=0) <= 1
        for one in self.live.values():
            if one.key[0] not in self.cancelled | failed:
                names = [(one.key[0], choice) for choice in one.choices]
                assert [finished[name] + self.preempted[name] for name in names] == [1] * len(names), one


@given(seed=st.integers(0, 100_000), blocks=st.integers(8, 16), cache=st.booleans(), ranks=st.sampled_from([1, 2]))
@settings(max_examples=60)
def test_sp_03_a_walk_never_stalls_leaks_or_ends_a_choice_twice(
    seed: int, blocks: int, cache: bool, ranks: int
) -> None:
    rng = random.Random(seed)
    book = DecodeBook(blocks=blocks, seats=rng.choice([3, 16]), ranks=ranks, prefix_cache=cache)
    walk = Walk(rng, book, ranks)
    for _ in range(100):
        walk.arrive()
        walk.deliver(0.5)
        walk.cancel()
        waiting, transfers = book.legs.load().waiting, bool(book.expected)
        assert walk.step() or transfers or not waiting, repr(book.legs)
    for _ in range(3000):
        walk.deliver(1.0)
        if not walk.step() and not book.expected:
            break
    walk.check()
