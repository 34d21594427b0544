"""The workers' books without engines: legs, tables of blocks, and the other side played by the test."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from baton.decode_worker import effects as decode_effects
from baton.decode_worker.intake import Intake
from baton.decode_worker.legs import DecodeLegs
from baton.decode_worker.prompts import Prompts
from baton.decode_worker.scheduler import DecodeScheduler
from baton.engine.block_pool import BlockPool
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.step import SampledToken, SequenceStep
from baton.kv_transfer.events import Sent
from baton.prefill_worker import effects as prefill_effects
from baton.prefill_worker.legs import PrefillLegs, Rules
from baton.proto import worker_pb2 as pb
from baton.proto.leg import Leg, LegKey
from baton.tests.harness.monolithic import sampling

BLOCK = 4
_ids = itertools.count(1)


def leg(
    length: int,
    max_tokens: int = 8,
    *,
    choices: Sequence[int] = (0,),
    generated: Sequence[int] = (),
    deadline: float = 1e9,
    first: int = 0,
    **changes: Any,
) -> Leg:
    """A leg of `length` prompt tokens first, first + 1, ...; legs with the same `first` share prefixes."""
    prompt = [first + index for index in range(length)]
    key = (f"q{next(_ids)}", 1, choices[0])
    params = sampling(max_tokens=max_tokens, n=len(choices), **changes)
    return Leg(key, tuple(choices), prompt, list(generated), prompt + list(generated), params, deadline, "")


def again(one: Leg, *choices: int, attempt: int = 0) -> Leg:
    """The same leg under this attempt, or the next one, with these choices, or all its own."""
    kept = choices or one.choices
    return dataclasses.replace(one, key=(one.key[0], attempt or one.key[1] + 1, kept[0]), choices=kept)


def drawn(steps: Sequence[SequenceStep], token: int = 7) -> list[list[SampledToken]]:
    """What an engine would draw: always `token`."""
    draws = [step.draw for step in steps if step.draw is not None]
    return [[SampledToken(choice, token, None, ()) for choice in draw.choices] for draw in draws]


def first_tokens(one: Leg, token: int = 7) -> bytes:
    """What a prefill worker's `finish` carries."""
    index = len(one.generated)
    reason = "length" if index + 1 >= one.sampling.max_tokens else ""
    tokens = [pb.Token(choice=c, index=index, token_id=token, finish_reason=reason) for c in one.choices]
    return pb.FirstTokens(tokens=tokens).SerializeToString()


class PrefillBook:
    """A prefill worker's book, with what its effects did."""

    def __init__(
        self, blocks: int = 16, budget: int = 8, ranks: int = 1, prefix_cache: bool = True, fetch_tokens: int = 0
    ) -> None:
        self.pool = BlockPool(blocks, BLOCK, prefix_cache)
        rules = Rules(keep_s=50.0, fetch_tokens=fetch_tokens, fetch_s=5.0)
        self.legs = PrefillLegs(self.pool, PrefillScheduler(budget), ranks, rules)
        self.told: list[pb.WorkerEvent] = []
        self.open: dict[LegKey, int] = {}  # transfers that may read blocks; tokens that were there when they began
        self.finishing: set[LegKey] = set()
        self.wanted: dict[LegKey, prefill_effects.ExpectPrefix] = {}  # prefixes that may be written to blocks
        self.now = 0.0

    def do(self, effects: Sequence[prefill_effects.Effect]) -> None:
        """Carry out effects."""
        for effect in effects:
            match effect:
                case prefill_effects.Tell(_, event):
                    self.told.append(event)
                case prefill_effects.OpenTransfer(key, _, _, _, there):
                    assert key not in self.open
                    self.open[key] = there
                case prefill_effects.ExpectPrefix():
                    self.wanted[effect.leg] = effect
                case prefill_effects.ForgetPrefix(key):
                    del self.wanted[key]
                case prefill_effects.FinishTransfer(key):
                    self.finishing.add(key)
                case prefill_effects.AbandonTransfer(key) | prefill_effects.CancelTransfer(key):
                    self.open.pop(key)
                    self.finishing.discard(key)
        self.pool.check()

    def submit(self, one: Leg, ticket: bytes = b"ticket", session: int = 1) -> Leg:
        """A prompt arrives."""
        self.do(self.legs.submit(session, one, ticket, self.now))
        return one

    def expire(self, now: float) -> None:
        """Time passes."""
        self.now = now
        self.do(self.legs.expire(now))

    def last(self, kind: str) -> Any:
        """The body of the latest event of this kind."""
        return [getattr(event, kind) for event in self.told if event.WhichOneof("event") == kind][-1]

    def plan(self) -> list[SequenceStep]:
        """Admission and the next step's plan."""
        self.do(self.legs.admit(self.now))
        return self.legs.plan()

    def step(self) -> list[SequenceStep]:
        """One whole step."""
        if steps := self.plan():
            self.do(self.legs.computed(steps, drawn(steps), self.now))
        return steps

    def sent(self, key: LegKey, rank: int = 0) -> None:
        """The transfer of one rank ends well."""
        self.open.pop(key, None)
        self.finishing.discard(key)
        self.do(self.legs.sent(rank, Sent(key, 10, 1, 0.0, 1.0)))

    def count(self, kind: str) -> int:
        """How many events of this kind the router got."""
        return Counter(event.WhichOneof("event") for event in self.told)[kind]


class DecodeBook:
    """A decode worker's book, with what its effects did."""

    def __init__(
        self, blocks: int = 16, seats: int = 16, ranks: int = 1, prefix_cache: bool = True, budget: int = 4
    ) -> None:
        self.pool = BlockPool(blocks, BLOCK, prefix_cache)
        intake = Intake(self.pool, ranks, seats, reserve_wait_s=100.0, commit_timeout_s=50.0)
        prompts = Prompts(self.pool, PrefillScheduler(budget))
        self.legs = DecodeLegs(self.pool, intake, DecodeScheduler(BLOCK), prompts, seats, max_model_len=10_000)
        self.told: list[pb.WorkerEvent] = []
        self.expected: dict[LegKey, decode_effects.Expect] = {}  # tickets that are out
        self.copied: list[tuple[int, int]] = []
        self.sends: dict[LegKey, decode_effects.Send] = {}  # transfers that may read blocks
        self.all_sends: list[decode_effects.Send] = []
        self.now = 0.0

    def do(self, effects: Sequence[decode_effects.Effect]) -> None:
        """Carry out effects."""
        for effect in effects:
            match effect:
                case decode_effects.Tell(_, event):
                    self.told.append(event)
                case decode_effects.Expect():
                    self.expected[effect.leg] = effect
                case decode_effects.Forget(key):
                    del self.expected[key]
                case decode_effects.Copy(pairs):
                    self.copied += pairs
                case decode_effects.Send():
                    assert effect.leg not in self.sends
                    self.sends[effect.leg] = effect
                    self.all_sends.append(effect)
                case decode_effects.CancelSend(key):
                    self.sends.pop(key, None)
        self.pool.check()

    def submit(self, one: Leg, session: int = 1, compute: bool = False) -> Leg:
        """A reservation arrives."""
        self.do(self.legs.submit(session, one, self.now, compute))
        return one

    def arrive(self, one: Leg, ranks: int = 1) -> None:
        """All KV and the first tokens of a reservation arrive."""
        self.do(self.legs.first_tokens(one.key, first_tokens(one), self.now))
        for rank in range(ranks):
            self.do(self.legs.arrived(one.key, rank, 100, 2, self.now))

    def step(self) -> list[SequenceStep]:
        """One turn of the worker."""
        self.do(self.legs.expire(self.now))
        steps, told = self.legs.plan()
        self.do(told)
        self.do(self.legs.admit(self.now))
        chunks = self.legs.plan_prompts()
        self.do(self.legs.computed(steps, drawn(steps), self.now))
        self.do(self.legs.prompts_computed(chunks, drawn(chunks), self.now))
        return [*steps, *chunks]

    def sent(self, key: LegKey, rank: int = 0) -> None:
        """What goes out of one rank arrived."""
        self.sends.pop(key, None)
        self.do(self.legs.sent(rank, Sent(key, 10, 1, 0.0, 1.0)))

    def of(self, kind: str) -> list[Any]:
        """Bodies of the events of this kind."""
        return [getattr(event, kind) for event in self.told if event.WhichOneof("event") == kind]

    def finished(self) -> Counter[tuple[str, int]]:
        """How often each (request, choice) was reported as finished by a step or a commit."""
        steps = [step for body in self.of("tokens") for step in body.tokens]
        return Counter((step.request_id, step.token.choice) for step in steps if step.token.finish_reason)
