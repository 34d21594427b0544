"""What is simulated: workers, requests and faults, drawn from a seed: plain data that can be cut down."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .crew import Spec
from .language import VOCABULARY

PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")
_LONGEST_PROMPT, _LONGEST_OUTPUT = 12, 12
_RATES = (3000.0, 1000.0, 1000.0, 200.0, 20.0)
_SLOW = (1000.0, 200.0, 20.0, 5.0)
_MARKS = {  # what a fault may wait for, and how often that happens in a usual run
    "reserve": 5,
    "prefill": 5,
    "cancel": 3,
    "release": 4,
    "ticket": 5,
    "first": 5,
    "sent": 4,
    "committed": 4,
    "tokens": 10,
    "preempted": 1,
    "hold": 1,
    "held": 1,
    "handover": 1,
    "unsent": 1,
    "want": 1,
    "give": 1,
    "failed": 1,
    "prefill.step": 6,
    "decode.step": 10,
    "link.hello": 3,
    "link.open": 5,
    "link.frame": 8,
    "link.accept": 8,
    "link.payload": 8,
    "link.ack": 8,
    "link.done": 5,
    "link.done_ack": 5,
}
_MOVING = ("hold", "held", "handover", "unsent", "link.open", "link.frame", "link.done", "committed", "release")
_FETCHING = ("want", "give", "link.hello", "link.open", "link.frame", "link.payload", "link.done", "first")
_KINDS = {
    "kill": 4,
    "vanish": 2,
    "stall": 3,
    "slow": 2,
    "cut session": 4,
    "mute session": 2,
    "cut link": 3,
    "mute link": 3,
    "corrupt": 2,
    "carrier": 2,
    "drain": 4,
    "duplicate": 2,
    "cancel": 5,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `stop_at`: the router ends choice 0 after so many tokens (0: never), as a stop string does."""

    number: int
    at: float
    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    salt: str
    deadline_s: float
    stop_at: int

    @property
    def request_id(self) -> str:
        """As in logs and stories."""
        return f"r{self.number}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something goes wrong `at` seconds from the start or, with a `mark`, when that happens for the `count`-th time."""

    kind: str
    at: float
    mark: str
    count: int
    who: str  # a worker, or a request
    other: str  # the decode worker, for a link
    amount: float  # seconds, mostly
    side: int  # towards which end of a wire

    def __str__(self) -> str:
        when = f"at {self.mark} number {self.count}" if self.mark else f"at {self.at:.4f} s"
        link = f" - {self.other}" if "link" in self.kind else ""
        towards = f" towards end {self.side}" if "mute" in self.kind else ""
        return f"{self.kind} {self.who}{link}{towards} {when} ({self.amount:.3f})"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. `luck` seeds the order of what happens; it changes only while a failing run is cut down."""

    seed: int
    luck: int
    workers: tuple[tuple[str, Spec], ...]
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    rates: tuple[float, ...]  # see World

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed}, luck {self.luck}",
                *(f"  {name}: {spec}" for name, spec in self.workers),
                *(f"  {ask}" for ask in self.asks),
                *(f"  fault: {fault}" for fault in self.faults),
            ]
        )


def scenario(seed: int) -> Scenario:
    """The scenario of a seed. Of six, one is a storm on slow wires around one decode worker that gets every attempt,
    one has choices moved off draining workers, and one has prompts that were seen before; each with faults to fit. Of
    the first six and every second six after them the decode workers speculate."""
    rng = random.Random(seed)
    storm, moves, again = (seed % 6 == number for number in (5, 4, 3))
    kv_heads = rng.choice([1, 1, 2])
    cache = again or rng.random() < 0.7
    workers = [(name, _spec(rng, "prefill", kv_heads, cache)) for name in PREFILL]
    decode = DECODE[:1] if storm or rng.random() < 0.1 else DECODE
    proposals = 1 + seed // 12 % 5 if seed // 6 % 2 == 0 else 0
    workers += [(name, replace(_spec(rng, "decode", kv_heads, cache), proposals=proposals)) for name in decode]
    stream = [rng.randrange(1, VOCABULARY) for _ in range(_LONGEST_PROMPT)]
    span = rng.choice([0.02, 0.06, 0.06, 0.5])
    asks = tuple(_ask(rng, number, stream, span) for number in range(rng.randint(2, 6)))
    if moves:
        asks = tuple(replace(ask, max_tokens=_LONGEST_OUTPUT, stop_at=0) for ask in asks)
    if again:
        asks = tuple(replace(ask, prompt=tuple(stream), n=1, salt="", at=ask.number * 0.1) for ask in asks)
    faults = tuple(_fault(rng, len(asks), decode, ()) for _ in range(rng.choice([0, 1, 2, 2, 3, 4])))
    if storm:
        asks = tuple(replace(ask, prompt=ask.prompt + tuple(stream[len(ask.prompt) :]), n=1) for ask in asks)
        faults = (*faults[:2], *(_cut(rng) for _ in range(2)))
    if moves:
        faults = (*faults[:1], *(_drain(rng, decode) for _ in range(2)), _fault(rng, len(asks), decode, _MOVING))
    if again:
        faults = (*faults[:1], _fault(rng, len(asks), decode, _FETCHING))
    return Scenario(seed, seed, tuple(workers), asks, faults, _SLOW if storm else _RATES)


def with_luck(one: Scenario, luck: int) -> Scenario:
    """The same, in another order."""
    return replace(one, luck=luck)


def _spec(rng: random.Random, role: str, kv_heads: int, cache: bool) -> Spec:
    size = rng.choice([2, 4, 4])
    least = -(-(_LONGEST_PROMPT + _LONGEST_OUTPUT) // size)
    blocks = max(least, 7) + rng.choice([0, 0, 1, 2, 12])  # 7: three choices of the longest such prompt can begin
    ranks = rng.choice([1, 1, 2])
    batch = rng.choice([4, 8, 16]) if role == "prefill" else rng.choice([3, 4, 8])
    return Spec(role, ranks, blocks, size, cache, batch, rng.choice([1, 2, 4]), kv_heads, rng.choice([0, 2]), 0)


def _ask(rng: random.Random, number: int, stream: list[int], span: float) -> Ask:
    n = rng.choice([1, 1, 1, 1, 2, 3])
    length = rng.randint(1, 6 if n > 1 else _LONGEST_PROMPT)
    shared = rng.choice([0, length, length, rng.randint(0, length)])
    prompt = stream[:shared] + [rng.randrange(1, VOCABULARY) for _ in range(length - shared)]
    return Ask(
        number,
        at=rng.random() * span,
        prompt=tuple(prompt),
        n=n,
        max_tokens=rng.choice([1, 2, 5, _LONGEST_OUTPUT, _LONGEST_OUTPUT]),
        salt=rng.choice(["", "", "", "other"]),
        deadline_s=rng.random() * 0.3 if rng.random() < 0.08 else 600.0,
        stop_at=rng.choice([0, 0, 0, 0, 1, 2, 3]),
    )


def _cut(rng: random.Random) -> Fault:
    """The router loses a prefill worker while it sends."""
    kind = rng.choice(["cut session", "cut session", "mute session"])
    mark = rng.choice(["link.frame", "link.accept", "link.payload"])
    return Fault(kind, 0.0, mark, rng.randint(1, 4), rng.choice(PREFILL), "", rng.choice([2.5, 4.0]), side=0)


def _drain(rng: random.Random, decode: tuple[str, ...]) -> Fault:
    mark = rng.choice(["tokens", "tokens", "committed", "decode.step", "reserve"])
    return Fault("drain", 0.0, mark, rng.randint(1, 5), rng.choice(decode), "", rng.choice([0.1, 0.5, 3.0]), side=0)


def _fault(rng: random.Random, asks: int, decode: tuple[str, ...], marks: tuple[str, ...]) -> Fault:
    """Any fault, at one of these marks; without marks at any, or at any moment."""
    kind = rng.choices(list(_KINDS), weights=list(_KINDS.values()))[0]
    mark = rng.choice(marks or list(_MARKS)) if marks or rng.random() < 0.6 else ""
    who = rng.choice(PREFILL + decode)
    if kind in ("cut link", "mute link"):
        who = rng.choice(PREFILL + decode[:1])
    elif kind == "drain":
        return _drain(rng, decode)
    elif kind == "cancel":
        who = f"r{rng.randrange(asks)}"
    return Fault(
        kind,
        at=rng.random() * 0.25,
        mark=mark,
        count=rng.randint(1, _MARKS.get(mark, 1)),
        who=who,
        other=decode[-1] if who in decode else rng.choice(decode),
        amount=rng.choice([0.3, 1.0, 3.0, 7.0]) * (0.5 + rng.random()),
        side=rng.randrange(2),
    )
