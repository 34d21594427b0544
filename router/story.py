"""The story of a request: what was heard about it and what was done, in order, for an operator to read.

A story is bounded: its last 64 entries, each one line; a run of token messages from one worker is one entry. It names
workers, attempts and choices, never a prompt and never a token. What was heard too late, twice or out of turn is kept
too, marked as dropped: that is what one looks for when a request went wrong.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from dataclasses import dataclass

from ..proto.errors import BatonError
from . import life_messages as m
from .life_messages import LegKey, Peer

MAX_ENTRIES = 64
MAX_ENDED = 256


@dataclass(slots=True)
class _Entry:
    """`at`, `last`: seconds since arrival of the first and the last of `times` equal pieces of news."""

    at: float
    last: float
    times: int
    text: str
    tokens_of: tuple[int, Peer] | None = None  # news of tokens: their attempt and worker

    def line(self) -> str:
        """For people."""
        again = f"  ({self.times} times, until {self.last:.3f} s)" if self.times > 1 else ""
        return f"{self.at:9.3f} s  {self.text}{again}"


class Story:
    """One request's. Times are the caller's monotonic clock, shown relative to the request's arrival."""

    def __init__(self, request_id: str, arrived: float) -> None:
        self.request_id = request_id
        self._arrived = arrived
        self._entries: deque[_Entry] = deque(maxlen=MAX_ENTRIES)
        self._forgotten = 0

    def heard(self, now: float, event: m.Event, heeded: bool) -> None:
        """News; not `heeded`: it changed nothing because it was late, stale or out of turn."""
        if heeded and isinstance(event, m.Tokens):
            self.went_on(now, event.attempt, event.peer)
            return
        self._add(now, f"{describe_event(event)}{'' if heeded else '  -- dropped'}")

    def did(self, now: float, action: m.Action) -> None:
        """What the request's life asked for; what it emits is not noted apart from the news that brought it."""
        if not isinstance(action, m.Emit):
            self._add(now, f"  {describe_action(action)}")

    def went_on(self, now: float, attempt: int, peer: Peer, times: int = 1) -> None:
        """Tokens came, most news of a long answer: a text is made for the first of a run only."""
        source = attempt, peer
        last = self._entries[-1] if self._entries else None
        if last is not None and last.tokens_of == source:
            last.times, last.last = last.times + times, now - self._arrived
            return
        self._add(now, describe_event(m.Tokens(attempt, peer, ())))
        self._entries[-1].times, self._entries[-1].tokens_of = times, source

    def lines(self) -> list[str]:
        """The story, oldest first."""
        gone = [f"({self._forgotten} earlier entries are forgotten)"] if self._forgotten else []
        return gone + [entry.line() for entry in self._entries]

    def __str__(self) -> str:
        return "\n".join([self.request_id, *self.lines()])

    def _add(self, now: float, text: str) -> None:
        at = now - self._arrived
        last = self._entries[-1] if self._entries else None
        if last is not None and last.text == text:
            last.times, last.last = last.times + 1, at
            return
        self._forgotten += len(self._entries) == MAX_ENTRIES
        self._entries.append(_Entry(at, at, 1, text))


class Stories:
    """Those of the requests in flight, and of the last ones that ended."""

    def __init__(self) -> None:
        self._live: dict[str, Story] = {}
        self._ended: OrderedDict[str, Story] = OrderedDict()

    def begin(self, request_id: str, now: float) -> Story:
        """A request arrived."""
        story = self._live[request_id] = Story(request_id, now)
        return story

    def end(self, request_id: str) -> None:
        """A request ended; late news about it is still added."""
        self._ended[request_id] = self._live.pop(request_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def find(self, request_id: str) -> Story | None:
        """None: never seen, or too long ago."""
        return self._live.get(request_id) or self._ended.get(request_id)


def describe_event(event: m.Event) -> str:
    """Who said what, in one line."""
    match event:
        case m.Tokens(attempt, peer, _):
            return f"{_who(peer)}: tokens of attempt {attempt}"
        case m.FirstTokens(leg, peer, tokens):
            return f"{_who(peer)}: first token of {len(tokens)} choice(s) of {_leg(leg)}"
        case m.Placed(leg, prefill, decode):
            if prefill is None:
                return f"router: {_leg(leg)} goes to {_who(decode) if decode else 'nobody'}, which computes it"
            return f"router: {_leg(leg)} goes to {_who(prefill)} and {_who(decode) if decode else 'no decode worker'}"
        case m.Unplaceable(leg, error):
            return f"router: no place for {_leg(leg)}: {_why(error)}"
        case m.Preempted(leg, peer, choice):
            return f"{_who(peer)}: choice {choice} of {_leg(leg)} was preempted"
        case m.Failed(leg, peer, error):
            return f"{_who(peer)}: {_leg(leg)} failed: {_why(error)}"
        case m.WorkerLost(peer):
            return f"router: {_who(peer)} is lost"
        case m.StopMatched(choice):
            return f"router: choice {choice} ended"
        case m.GiveUp(error):
            return f"router: gives up: {_why(error)}"
    return _plain(event)


def describe_action(action: m.Action) -> str:
    """What was asked of whom, in one line."""
    match action:
        case m.Place(leg):
            causes = [action.cause]
            causes += [f"in {action.after_s:g} s"] if action.after_s else []
            causes += [f"not {', '.join(sorted(_who(peer) for peer in action.avoid))}"] if action.avoid else []
            return f"router: place {_leg(leg)} ({'; '.join(causes)})"
        case m.EnterGate(leg, peer, tokens):
            return f"router: {_leg(leg)} waits for its turn at {_who(peer)} ({tokens} tokens)"
        case m.CancelChoices(leg, peer, choices):
            return f"to {_who(peer)}: end choices {list(choices)} of {_leg(leg)}"
        case m.End(error):
            return f"router: ended: {_why(error) if error else 'completed'}"
    return _plain(action)


def _plain(message: m.Event | m.Action) -> str:
    """Whatever has no words of its own: the class's name, its leg and its worker."""
    peer: Peer | None = getattr(message, "peer", None)
    leg: LegKey | None = getattr(message, "leg", None)
    who = f"{'to ' if isinstance(message, m.Action) else ''}{_who(peer)}" if peer else "router"
    return f"{who}: {_words(type(message).__name__)}{f' {_leg(leg)}' if leg else ''}"


@functools.cache
def _words(name: str) -> str:
    """HandOver -> hand over."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def _who(peer: Peer) -> str:
    return f"{peer.worker_id}/{peer.incarnation[:8]}"


def _leg(leg: LegKey) -> str:
    return f"attempt {leg.attempt}" + (f".{leg.first_choice}" if leg.first_choice else "")


def _why(error: BatonError) -> str:
    return f"{error.code} ({error})"
