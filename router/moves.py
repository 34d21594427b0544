"""Takes choices off decode workers that drain: each moves, with its KV, to another one that has room for it.

`due` is pure. Where no other worker has room the choices go on where they are, as they would without this; the question
comes up again every `PERIOD_S` as long as a worker drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import life_messages as m
from .dispatch import model_of, room
from .leg_table import LegState
from .life_messages import LegKey
from .live import Live
from .lives import Lives
from .outstanding import Room
from .sessions import SessionPool

PERIOD_S = 0.2
AT_ONCE = 8  # choices on their way at the same time: each holds blocks on two workers
_ON_THE_WAY = (LegState.REPLACING, LegState.REBOOKING, LegState.RESENDING)


class Stream(NamedTuple):
    """A choice that runs on a draining worker, and the tokens of KV that it can need in all."""

    request_id: str
    leg: LegKey
    choice: int
    tokens: int


def due(streams: Iterable[Stream], rooms: Sequence[Room], under_way: Sequence[int]) -> list[Stream]:
    """Those to move now. `under_way`: tokens of each choice that moves already; it may yet need room anywhere."""
    left = list(rooms)
    for tokens in under_way:
        left = [one.less(tokens) for one in left]
    chosen: list[Stream] = []
    for stream in streams:
        widest = max(range(len(left)), key=lambda index: left[index].tokens, default=None)
        if widest is None or len(chosen) + len(under_way) >= AT_ONCE:
            break
        if left[widest].fits(stream.tokens):
            left[widest] = left[widest].less(stream.tokens)
            chosen.append(stream)
    return chosen


class Moves:
    """Runs on the router's event loop."""

    def __init__(self, sessions: SessionPool, lives: Lives) -> None:
        self._sessions = sessions
        self._lives = lives
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Moves what can be moved now, and comes back as long as a worker drains. Called when the view changes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        up = [session for session in self._sessions.up() if session.member.role == "decode"]
        draining = [session for session in up if session.member.state == "draining"]
        for leaving in draining:
            streams, under_way = self._on(leaving.member.peer)
            others = [s for s in up if s.member.state == "ready" and model_of(s) == model_of(leaving)]
            for stream in due(streams, [room(session) for session in others], under_way):
                live = self._lives.get(stream.request_id)
                if live is not None:
                    self._lives.handle(live, m.Migrate(stream.leg, stream.choice))
        if draining:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self.look)

    def _on(self, peer: m.Peer) -> tuple[list[Stream], list[int]]:
        """The choices that run on the worker, and the tokens of those that are being moved by anybody."""
        streams: list[Stream] = []
        under_way: list[int] = []
        for live in self._lives:
            tokens = _most(live)
            for leg in live.life.legs.values():
                under_way += [tokens] * (len(leg.holding) + (leg.state in _ON_THE_WAY))
                if leg.state is LegState.DECODING and leg.decode == peer:
                    open_ones = [c for c in leg.choices if not live.life.ledgers[c].finished and c not in leg.holding]
                    streams += [Stream(live.request_id, leg.key, choice, tokens) for choice in open_ones]
        return streams, under_way


def _most(live: Live) -> int:
    return len(live.request.prompt_ids) + live.life.max_tokens
