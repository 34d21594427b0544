"""The two ends of a leg's handoff as tables (pure): events in, a new state or nothing out.

A terminal state is reached once and never left. An event that the table does not list for a state is illegal: it
changes nothing and is reported as such, so late, repeated and reordered news cannot hurt.

| end | state | meaning |
|---|---|---|
| decode rank | expecting | frames are placed |
| | covered | all KV is here; what `finish` carries is not (rank 0 only) |
| | complete, failed, abandoned, forgotten | terminal: nothing is placed any more |
| prefill rank | sending | queued KV goes out |
| | sent, failed, abandoned, cancelled | terminal: no frame is started any more |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .plan import Box, Range

RECEIVE: dict[tuple[str, str], str] = {
    ("expecting", "covered"): "covered",
    ("covered", "finished"): "complete",
    ("expecting", "fail"): "failed",
    ("covered", "fail"): "failed",
    ("expecting", "abandon"): "abandoned",
    ("covered", "abandon"): "abandoned",
    ("expecting", "forget"): "forgotten",
    ("covered", "forget"): "forgotten",
}
SEND: dict[tuple[str, str], str] = {
    ("sending", "acknowledged"): "sent",
    ("sending", "fail"): "failed",
    ("sending", "abandon"): "abandoned",
    ("sending", "cancel"): "cancelled",
}


class Handoff:
    """One end's state, moved by its table."""

    def __init__(self, table: dict[tuple[str, str], str], initial: str) -> None:
        self._table = table
        self.state = initial

    def __repr__(self) -> str:
        return f"Handoff({self.state})"

    def on(self, event: str) -> bool:
        """Apply an event. False: illegal in this state, nothing changed."""
        following = self._table.get((self.state, event))
        if following is None:
            return False
        self.state = following
        return True


_NOTHING: dict[Range, list[Range]] = {}


class Coverage:
    """Which cells of an expected box have been placed. Placed boxes never overlap, so counting cells is enough."""

    def __init__(self, expected: Box) -> None:
        self.expected = expected
        self.cells = 0
        # layer -> heads -> disjoint sorted token ranges: a look-up costs the layers of a box, not all that was placed
        self._placed: dict[int, dict[Range, list[Range]]] = {}

    @property
    def complete(self) -> bool:
        """Whether every expected cell is there."""
        return self.cells == self.expected.volume

    def problem(self, box: Box) -> str:
        """Why this box may not be placed; empty when it may."""
        due = self.expected
        if not (_within(box.tokens, due.tokens) and _within(box.layers, due.layers) and _within(box.heads, due.heads)):
            return f"{box} is empty or outside the expected {due}"
        for layer in range(*box.layers):
            for heads, spans in self._placed.get(layer, _NOTHING).items():
                if heads[0] < box.heads[1] and box.heads[0] < heads[1] and _hits(spans, box.tokens):
                    return f"overlaps what was placed before: {box}"
        return ""

    def add(self, box: Box) -> None:
        """Count a box for which `problem` is empty."""
        for layer in range(*box.layers):
            _insert(self._placed.setdefault(layer, {}).setdefault(box.heads, []), box.tokens)
        self.cells += box.volume


def _within(span: Range, whole: Range) -> bool:
    """Whether `span` has elements, all of them in `whole`."""
    return whole[0] <= span[0] < span[1] <= whole[1]


def _insert(spans: list[Range], tokens: Range) -> None:
    """Add a range to sorted disjoint ones that it does not meet; neighbours become one."""
    start, stop = tokens
    at = bisect_left(spans, tokens)
    if at < len(spans) and spans[at][0] == stop:
        stop = spans.pop(at)[1]
    if at > 0 and spans[at - 1][1] == start:
        at -= 1
        start = spans.pop(at)[0]
    spans.insert(at, (start, stop))


def _hits(spans: Sequence[Range], tokens: Range) -> bool:
    """Whether sorted disjoint `spans` meet `tokens`."""
    at = bisect_left(spans, (tokens[1], -1))  # the first span that starts at or after the end
    return at > 0 and spans[at - 1][1] > tokens[0]


class ReceiveLeg:
    """What one decode rank knows of one leg. Each method returns whether it changed anything."""

    def __init__(self, expected: Box, wants_first_tokens: bool) -> None:
        self._handoff = Handoff(RECEIVE, "expecting")
        self._coverage = Coverage(expected)
        self._waits_for_first = wants_first_tokens
        self._by_source: dict[int, int] = {}  # prefill rank -> cells placed
        self.bytes = self.frames = 0

    @property
    def state(self) -> str:
        """As in the table above."""
        return self._handoff.state

    @property
    def open(self) -> bool:
        """Whether the leg has not reached a terminal state."""
        return self.state in ("expecting", "covered")

    def problem(self, box: Box) -> str:
        """Why a frame with this box is refused; empty when it may be placed."""
        if self.state != "expecting":
            return f"the leg is {self.state}"
        return self._coverage.problem(box)

    def placed(self, box: Box, source: int, size: int) -> bool:
        """A frame for which `problem` is empty, from prefill rank `source`, is in the pool. True: that was the last."""
        if self.state != "expecting":
            return False
        self._coverage.add(box)
        self._by_source[source] = self._by_source.get(source, 0) + box.volume
        self.bytes += size
        self.frames += 1
        return self._covered()

    def source_done(self, source: int, heads: int) -> tuple[str, bool]:
        """Prefill rank `source`, which has `heads` of our heads, says that it sent everything.

        Returns what it did not send (empty when nothing), and whether the KV became complete (an empty range only).
        """
        expected = self._coverage.expected
        due = Box(expected.tokens, expected.layers, (0, heads)).volume
        sent = self._by_source.get(source, 0)
        if sent != due:
            return f"prefill rank {source} ended the leg after {sent} of {due} cells", False
        return "", self._covered()

    def first_tokens(self) -> bool:
        """What `finish` carries came. False when it is not wanted (any more)."""
        if not self._waits_for_first or not self.open:
            return False
        self._waits_for_first = False
        self._settle()
        return True

    def end(self, event: str) -> bool:
        """`fail`, `abandon` or `forget`."""
        return self._handoff.on(event)

    def _covered(self) -> bool:
        if not self._coverage.complete or not self._handoff.on("covered"):
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        if self.state == "covered" and not self._waits_for_first:
            self._handoff.on("finished")


class SendLeg:
    """What one prefill rank knows of one leg, over all its links: terminal once."""

    def __init__(self, links: Sequence[int]) -> None:
        self._handoff = Handoff(SEND, "sending")
        self._waiting = set(links)
        self.bytes = self.frames = 0
        self.started_at = 0.0

    @property
    def state(self) -> str:
        """As in the table above."""
        return self._handoff.state

    @property
    def open(self) -> bool:
        """Whether frames may still be started."""
        return self.state == "sending"

    def acknowledged(self, link: int) -> bool:
        """The decode rank on `link` has everything. True: that was the last one, the leg is sent."""
        self._waiting.discard(link)
        return not self._waiting and self._handoff.on("acknowledged")

    def end(self, event: str) -> bool:
        """`fail`, `abandon` or `cancel`."""
        return self._handoff.on(event)
