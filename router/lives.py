"""Requests in flight: feeds events to their lives, carries out what the lives ask for, and keeps their stories.

It decides nothing by itself: request_life.py says what to do, dispatch.py where and when. It opens no socket and sets
no clock going: sessions, timers and the audience are given, so that the simulation runs this very code.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError
from . import flow
from . import life_messages as m
from .dispatch import Dispatcher
from .flow import Flow
from .life_messages import Peer
from .live import Live
from .placer import Placer
from .sessions import SessionPool
from .story import Stories, Story

_ANSWER_S = 1.0  # for a decode worker to say whether it has all KV of a leg: a step may be under way
Later = Callable[[float, Callable[[], None]], object]  # seconds from now, what to do then


class Audience(Protocol):
    """Who is told how the requests fare."""

    def placing(self, live: Live, action: m.Place) -> None:
        """Workers are about to be chosen for a leg."""
        ...

    def emitted(self, live: Live, tokens: Sequence[pb.Token]) -> None:
        """Tokens for the client, each once and in order."""
        ...

    def ended(self, live: Live, error: BatonError | None) -> None:
        """The request is over; said once."""
        ...


class Lives:
    """All requests of one router that have not ended."""

    def __init__(
        self,
        sessions: SessionPool,
        placer: Placer,
        audience: Audience,
        later: Later,
    ) -> None:
        self.dispatcher = Dispatcher(sessions, placer, self._report)
        self.stories = Stories()
        self._audience = audience
        self._later = later
        self.flows: dict[str, Flow] = {}  # by request id, of those whose tokens take the short way
        self._lives: dict[str, Live] = {}
        self._work: deque[tuple[Live, m.Event | None]] = deque()
        self._working = False

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._lives.values()))

    def get(self, request_id: str) -> Live | None:
        """The request, unless it has ended."""
        return self._lives.get(request_id)

    def begin(self, live: Live) -> None:
        """Takes in a request."""
        self._lives[live.request_id] = live
        self.stories.begin(live.request_id, time.monotonic())
        self._work.append((live, None))
        self._drain()

    def handle(self, live: Live, event: m.Event) -> None:
        """Feeds an event, and all that follow from it; called from within an action, it is fed after that."""
        self._work.append((live, event))
        self._drain()

    def flow(self, live: Live, attempt: int, peer: Peer, audience: flow.Audience) -> None:
        """Lets the leg's next tokens take the short way, until something else is heard of the request."""
        ledgers, story = live.life.going_on(attempt, peer), self.stories.find(live.request_id)
        if ledgers and story is not None:
            self.flows[live.request_id] = Flow(live, attempt, peer, ledgers, story, audience)

    def story(self, request_id: str) -> Story | None:
        """That of a request in flight, or of one that ended lately."""
        flow = self.flows.get(request_id)
        if flow is not None:
            flow.tell()
        return self.stories.find(request_id)

    def late(self, request_id: str, event: m.Event) -> None:
        """News of a request that has ended."""
        story = self.stories.find(request_id)
        if story is not None:
            story.heard(time.monotonic(), event, heeded=False)

    def worker_up(self, peer: Peer, welcome: pb.Welcome) -> None:
        """A worker can be used, also by legs that wait for one."""
        self.dispatcher.worker_up(peer, welcome)
        self._drain()

    def look_again(self) -> None:
        """The membership changed: a worker may take new legs again."""
        self.dispatcher.look_again()
        self._drain()

    def worker_lost(self, peer: Peer) -> None:
        """A worker, with all that it held for us, is gone."""
        self.dispatcher.worker_lost(peer)
        for live in self:
            self.handle(live, m.WorkerLost(peer))

    def _report(self, request_id: str, event: m.Event) -> None:
        live = self._lives.get(request_id)
        if live is not None:
            self._work.append((live, event))

    def _drain(self) -> None:
        """Events in the order in which they came up; actions of one request may concern others."""
        if self._working:
            return
        self._working = True
        try:
            while self._work:
                live, event = self._work.popleft()
                self._feed(live, event)
        finally:
            self._working = False

    def _feed(self, live: Live, event: m.Event | None) -> None:
        now, story = time.monotonic(), self.stories.find(live.request_id)
        flow = self.flows.pop(live.request_id, None)
        if flow is not None:
            flow.settle(now)
        actions = live.life.start() if event is None else live.life.handle(event)
        if story is not None:
            heeded = live.life.heeded
            if event is not None and (heeded or not isinstance(event, m.WorkerLost | m.StopMatched)):
                story.heard(now, event, heeded)
            for action in actions:
                story.did(now, action)
        if isinstance(event, m.Placed) and not live.life.heeded:  # the leg ended while its workers were chosen
            self.dispatcher.prefill_over(live, event.leg)
            self.dispatcher.leg_over(live, event.leg)
        for action in actions:
            self._act(live, action)

    def _act(self, live: Live, action: m.Action) -> None:
        match action:
            case m.Emit(tokens):
                self._audience.emitted(live, tokens)
            case m.Place():
                self._audience.placing(live, action)
                self._place(live, action)
            case m.EnterGate():
                self.dispatcher.enter_gate(live, action)
            case m.PrefillOver(leg):
                self.dispatcher.prefill_over(live, leg)
            case m.LegOver(leg):
                self.dispatcher.leg_over(live, leg)
            case m.End(error):
                del self._lives[live.request_id]
                self._audience.ended(live, error)
                self.stories.end(live.request_id)
            case _:
                if isinstance(action, m.Reserve) or (isinstance(action, m.Prefill) and not action.ticket):
                    # the first command after the gate
                    live.record.gate_s += self.dispatcher.waited(live.request_id, action.leg)
                self.dispatcher.send(live, action)
                if isinstance(action, m.WithdrawLeg):
                    late = m.Unanswered(action.leg, action.error)
                    self._later(_ANSWER_S, lambda: self.handle(live, late))

    def _place(self, live: Live, action: m.Place) -> None:
        if action.after_s:
            again = dataclasses.replace(action, after_s=0.0)
            self._later(action.after_s, lambda: self._place_later(live, again))
        else:
            self.dispatcher.place(live, action)

    def _place_later(self, live: Live, action: m.Place) -> None:
        if live.life.outcome is None and action.leg.attempt in live.life.legs:
            self.dispatcher.place(live, action)
            self._drain()
