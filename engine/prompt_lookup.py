"""Prompt lookup: what followed the last time that the end of a sequence occurred in it is proposed again. Pure.

Code, tables and answers that quote their prompt repeat themselves, and looking up costs no model. After Saxena, "Prompt
Lookup Decoding" (2023).

The index is the hash chain of LZ77 compressors: each pair of tokens leads to where it occurred last, each place to the
one before it. So a token costs O(1) to add, and a look-up compares a bounded number of places backwards; the longest
match wins, and of equals the latest.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from .proposer import SequenceName, Wanted
from .step import Draw

_SHORTEST = 2  # tokens of a match: what the index finds
_LONGEST = 16  # a longer match is no better
_PLACES = 16  # looked at


class PromptLookup:
    """A `Proposer`. Memory: about 150 bytes for each token of the sequences that it follows."""

    def __init__(self) -> None:
        self._followed: dict[SequenceName, History] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """See Proposer."""
        return [self._one(one) for one in wanted]

    def unread(self, name: SequenceName, prompt: int) -> int:
        """See Proposer. No model reads here."""
        return 0

    def keep(self, names: Collection[SequenceName]) -> None:
        """See Proposer."""
        for name in self._followed.keys() - set(names):
            del self._followed[name]

    def _one(self, wanted: Wanted) -> list[int]:
        history = self._followed.setdefault(wanted.name, History())
        history.follow(wanted.draw)
        return history.continuation(wanted.count)


class History:
    """One sequence's tokens, indexed by the pairs in them."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # pair -> the place behind its last occurrence
        self._before = array("q")  # place -> the place behind the occurrence before, of the pair that ends there; or -1

    def follow(self, draw: Draw) -> None:
        """Add what is new."""
        known, prompt = len(self._tokens), len(draw.prompt)
        self.extend(draw.prompt[known:])
        self.extend(draw.generated[max(known - prompt, 0) :])

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end. A pair is found once something follows it."""
        for token in tokens:
            place = len(self._tokens)
            pair = (self._tokens[place - 2], self._tokens[place - 1]) if place >= _SHORTEST else None
            self._before.append(-1 if pair is None else self._latest.get(pair, -1))
            if pair is not None:
                self._latest[pair] = place
            self._tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """`count` tokens that followed the best match, or [] where there is none. A match that overlaps the end is a
        loop, and is gone through again."""
        place = self._best_place()
        if place < 0:
            return []
        period = len(self._tokens) - place
        return [self._tokens[place + step % period] for step in range(count)]

    def _best_place(self) -> int:
        tokens = self._tokens
        if len(tokens) < _SHORTEST:
            return -1
        best, longest = -1, 0
        place = self._latest.get((tokens[-2], tokens[-1]), -1)
        for _ in range(_PLACES):
            if place < 0 or longest == _LONGEST:
                break
            length = self._match_length(place)
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best

    def _match_length(self, place: int) -> int:
        """How many of the tokens before `place` are those at the end, the index's own included."""
        tokens, length = self._tokens, _SHORTEST
        while length < min(place, _LONGEST) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
