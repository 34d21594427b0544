"""Stop strings in a stream: text that may still become one is held back, and the cut is exactly at the match."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches the text of one choice for `stops`.

    The first stop string to be complete ends the text; of several that end at the same character the longest counts. So
    the result depends on the text alone, not on how it was split over the calls. Each stop is followed by its
    Knuth-Morris-Pratt automaton, whose state is the number of its characters that are held back.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """include: keep the matched stop string in the text. Raises ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to give out, the stop string matched or None). After a match nothing more comes out."""
        if not self._stops:
            return text, None
        if self._matched is not None:
            return "", self._matched
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            matched = self._step(character)
            if matched is not None:
                self._matched, self._held = matched, ""
                return buffer[: position if self._include else position - len(matched)], matched
        keep = max(self._states, default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What is still held back when the text ends without a match."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _step(self, character: str) -> str | None:
        matched = None
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != character:
                state = self._failures[i][state - 1]
            self._states[i] = state = state + (stop[state] == character)
            if state == len(stop) and matched is None:
                matched = stop
        return matched


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    state = 0
    for i in range(1, len(stop)):
        while state and stop[i] != stop[state]:
            state = table[state - 1]
        state += stop[i] == stop[state]
        table[i] = state
    return table
