"""What surrounds the engine of a simulated worker: its queue, its followers, and its end of sessions."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.engine.rank_start import RankMessage
from baton.engine.step import SequenceStep
from baton.prefill_worker.worker import push_layers
from baton.proto.kv_layout import KVLayout
from baton.proto.worker_loop import Commands

from .language import LAYERS
from .world import Wire

if TYPE_CHECKING:
    from .worker import Process


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker is started with."""

    role: str
    ranks: int
    blocks: int
    block_size: int
    prefix_cache: bool
    batch: int  # tokens of a prefill step, or sequences of a decode batch
    lookahead: int
    kv_heads: int
    fetch_tokens: int  # the least prefix that a prefill worker asks a decode worker for; 0: it never asks
    proposals: int  # of a decode worker for a sequence and step, at most; 0: it does not speculate

    @property
    def layout(self) -> KVLayout:
        """Heads are split evenly; a head that is lacking is held twice."""
        ranges = [(0, 1)] if self.kv_heads == 1 else [(0, 2)]
        if self.ranks == 2:
            ranges = [(0, 1), (0, 1)] if self.kv_heads == 1 else [(0, 1), (1, 2)]
        return KVLayout("model", LAYERS, self.kv_heads, 1, "rope", "float32", self.block_size, tuple(ranges))


class Inbox:
    """In place of the engine thread's queue."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._items: deque[object] = deque()
        self._wake = wake

    def put(self, item: object) -> None:
        """An item, from whoever."""
        self._items.append(item)
        self._wake()

    def get_nowait(self) -> object:
        """Raises queue.Empty."""
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class Crew:
    """The line between rank 0 and its followers, in order both ways; the followers obey as the product's do."""

    def __init__(self, process: Process, obey: Callable[[Any, int], object]) -> None:
        self._process = process
        self._obey = obey
        self._orders: list[deque[dict[str, Any]]] = [deque() for _ in range(process.spec.ranks - 1)]
        self._reports: deque[tuple[int, dict[str, Any]]] = deque()
        self._delay_s = process.world.rng.choice([0.0, 0.0, 0.03])

    def broadcast(self, message: dict[str, Any]) -> None:
        """An order to all followers."""
        for orders in self._orders:
            orders.append(message)
            delay_s = self._process.pause() + self._delay_s * self._process.world.rng.random()
            self._process.world.at(delay_s, self._next, orders)

    def _next(self, orders: deque[dict[str, Any]]) -> None:
        if orders and self._process.alive:
            self._obey(orders.popleft(), self._orders.index(orders) + 1)

    def catch_up(self) -> None:
        """A step begins: the followers have done all that they were told before."""
        for rank, orders in enumerate(self._orders, 1):
            while orders:
                self._obey(orders.popleft(), rank)

    def push_layers(self, steps: Sequence[SequenceStep], low: int, high: int) -> None:
        """The followers' senders hear of what was computed."""
        for sender in self._process.senders[1:]:
            push_layers(sender, steps, low, high)

    def report(self, rank: int) -> Any:
        """The follower's end of the line."""
        return _Line(self, rank)

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """A follower says something."""
        self._reports.append((rank, message))
        self._process.world.at(self._process.pause(), self._heard)

    def _heard(self) -> None:
        if self._process.alive:
            self._process.inbox.put(RankMessage(*self._reports.popleft()))


@dataclass(slots=True)
class _Line:
    crew: Crew
    rank: int

    def send(self, message: dict[str, Any]) -> None:
        self.crew.send(self.rank, message)


class Session:
    """The worker's end of a session: end 1 of a wire."""

    def __init__(self, process: Process, number: int) -> None:
        self.wire: Wire | None = None
        self._process = process
        self._number = number

    def on_message(self, message: Any) -> None:
        """A router's command."""
        self._process.inbox.put(Commands(self._number, [message]))

    def on_closed(self, reason: str) -> None:
        """The router is gone."""
        self._process.end_session(self._number)

    def on_silence(self) -> bool:
        """The router is dead for us."""
        if self.wire is not None:
            self.wire.close(1)
        self._process.end_session(self._number)
        return True
