"""Who guesses the next tokens of sequences, for speculative decoding: one interface, two kinds behind it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from .step import Draw

SequenceName = tuple[tuple[str, int, int], int]  # request id, attempt, first choice of the leg; the choice


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence that could take `count` >= 1 proposed tokens.

    `draw`: how its next token is drawn; what is proposed follows `draw.prompt` and `draw.generated`. From call to call
    the history of a name only grows at its end.
    """

    name: SequenceName
    draw: Draw
    count: int


class Proposer(Protocol):
    """Called by the engine's thread alone."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """For each sequence `count` tokens or fewer, perhaps none: what may come next."""
        ...

    def unread(self, name: SequenceName, prompt: int) -> int:
        """How many of the `prompt` tokens that the sequence began with must be read by a model before it proposes."""
        ...

    def keep(self, names: Collection[SequenceName]) -> None:
        """Forget every other sequence; one that comes back is met as a new one."""
        ...
