"""Virtual time for the simulation: a heap of things to do, a seeded generator, and wires that break on request.

Nothing here waits: the clock jumps to whatever is next. The product's own modules ask `time.monotonic`, and within
`virtual_time` that is this clock.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

_ROOMS = ("baton.router.", "baton.prefill_worker.", "baton.decode_worker.", "baton.kv_transfer.", "baton.proto.")


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """One simulated cluster's clock and luck. `mark` is told the name of everything that happens."""

    def __init__(self, seed: int, rates: Sequence[float]) -> None:
        self.now = 1000.0
        self.rates = rates  # of wires: messages arrive after 1 / rate seconds on average
        self.rng = random.Random(seed)
        self.steps = 0
        self.disturbed = self.now  # when something went wrong, or was put right, for the last time
        self.on_mark: Callable[[str], None] | None = None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, delay: float, do: Callable[..., None], *arguments: Any) -> None:
        """Do it `delay` seconds from now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay, self._number, do, arguments))

    def step(self) -> bool:
        """The next thing; False when there is none."""
        if not self._heap:
            return False
        self.now, _, do, arguments = heapq.heappop(self._heap)
        self.steps += 1
        do(*arguments)
        return True


class _Clock:
    """Stands for the module `time` in the product's modules."""

    def __init__(self) -> None:
        self.world: World | None = None

    def monotonic(self) -> float:
        return self.world.now if self.world is not None else time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)  # for whoever else runs in this process


CLOCK = _Clock()


@contextlib.contextmanager
def virtual_time() -> Iterator[None]:
    """Within it, the product's modules read the time of `CLOCK.world`."""
    rooms = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(_ROOMS) and getattr(module, "time", None) is time
    ]
    for module in rooms:
        vars(module)["time"] = CLOCK
    try:
        yield
    finally:
        CLOCK.world = None
        for module in rooms:
            vars(module)["time"] = time


class End(Protocol):
    """Who holds one end of a wire."""

    def on_message(self, message: Any) -> None:
        """Something arrived."""
        ...

    def on_closed(self, reason: str) -> None:
        """The other end closed it, or it broke. Nothing comes any more."""
        ...

    def on_silence(self) -> bool:
        """Nothing has come for `limit_s`, heartbeats included. True: the end closed the wire."""
        ...


class Wire:
    """A connection: in order and complete in each direction, until it breaks. Ends are 0 (who dialled) and 1."""

    def __init__(self, world: World, ends: tuple[End, End], limit_s: float, name: Callable[[Any], str]) -> None:
        self.open = True
        self._world = world
        self._ends = ends
        self._limit_s = limit_s
        self._name = name
        self._rate = world.rng.choice(world.rates)
        self._due = [0.0, 0.0]  # when the last message towards an end arrives
        self._muted: list[list[Any] | None] = [None, None]  # what waits, towards an end that hears nothing
        self._until = [0.0, 0.0]  # when it hears again
        self.duplicate = 0  # so many of the next messages come twice, one after the other

    def send(self, towards: int, message: Any) -> None:
        """Put a message on its way."""
        if not self.open:
            return
        arrival = max(self._due[towards], self._world.now + self._world.rng.expovariate(self._rate))
        self._due[towards] = arrival
        self._world.at(arrival - self._world.now, self._arrive, towards, message)

    def close(self, by: int) -> None:
        """One end leaves: the other hears of it behind what is on its way there."""
        if self.open:
            self.send(1 - by, _CLOSED)
            self._left(by)

    def cut(self, reason: str) -> None:
        """What is on its way is lost, and both ends notice."""
        if self.open:
            self.open = False
            for end in self._ends:
                self._world.at(self._world.rng.random() * 0.01, end.on_closed, reason)

    def mute(self, towards: int, for_s: float) -> None:
        """An end hears nothing for a while, and is told so when that lasts too long; what is sent to it waits."""
        self._world.at(self._limit_s, self._silence, towards, self.hold(towards, for_s))

    def hold(self, towards: int, for_s: float) -> list[Any]:
        """The same for an end that stands still itself. Returns what waits."""
        if (waiting := self._muted[towards]) is None:
            self._muted[towards] = waiting = []
        self._until[towards] = max(self._until[towards], self._world.now + for_s)
        self._world.at(for_s, self._unmute, towards, waiting)
        return waiting

    def _left(self, by: int) -> None:
        self._ends = (_GONE, self._ends[1]) if by == 0 else (self._ends[0], _GONE)

    def _arrive(self, towards: int, message: Any) -> None:
        if not self.open:
            return
        if (waiting := self._muted[towards]) is not None:
            waiting.append(message)
            return
        if message is _CLOSED:
            self.open = False
            self._ends[towards].on_closed("closed by the peer")
            return
        if self._world.on_mark is not None:
            self._world.on_mark(self._name(message))
        for _ in range(2 if self.duplicate else 1):
            if self.open:
                self._ends[towards].on_message(message)
        self.duplicate = max(0, self.duplicate - 1)

    def _silence(self, towards: int, waiting: list[Any]) -> None:
        if self.open and self._muted[towards] is waiting and not self._ends[towards].on_silence():
            self._world.at(self._limit_s, self._silence, towards, waiting)

    def _unmute(self, towards: int, waiting: list[Any]) -> None:
        if self.open and self._muted[towards] is waiting and self._world.now >= self._until[towards] - 1e-9:
            self._muted[towards] = None
            self._world.disturbed = self._world.now
            for message in waiting:
                self._world.at(0.0, self._arrive, towards, message)


class _Gone:
    def on_message(self, message: Any) -> None: ...

    def on_closed(self, reason: str) -> None: ...

    def on_silence(self) -> bool:
        return True


_GONE = _Gone()
_CLOSED = object()
