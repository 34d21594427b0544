"""Decode steps that run ahead: queued before the tokens of the step before are on the host. Pure.

A sequence of the next step takes its input from the device, as `-1 - r`: what row r of the step before drew. It is
answered when its owner asks for it with the token that it has heard meanwhile; one that has ended is never asked for,
and what was drawn for it is dropped. Draws have no state and KV is written where it would be written anyway, so a step
that is dropped and run again says the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from .device_sampler import Drawn
from .proposer import SequenceName
from .speculation import name_of
from .step import SampledToken, SequenceStep


def can_run_ahead(step: SequenceStep) -> bool:
    """Whether all that its next step needs from the host is how many tokens there are: no proposals, grammars or
    penalties, one choice."""
    draw = step.draw
    return (
        draw is not None
        and len(step.tokens) == len(draw.choices) == 1
        and step.scores is None
        and not draw.params.penalised
        and not draw.params.grammar
    )


def next_step(step: SequenceStep, row: int, block_size: int, longest: int) -> SequenceStep | None:
    """What follows `step`, the row-th of its batch; None where it ends with its token, or has no room for another."""
    draw = step.draw
    if draw is None or step.end >= min(longest, len(step.blocks) * block_size):
        return None
    said = len(draw.generated) + 1
    if said >= draw.params.max_tokens:
        return None
    # nothing looks at what was said, only at how much
    return replace(step, tokens=[-1 - row], start=step.end, draw=replace(draw, generated=range(said)))


class Flight:
    """A queued step of one row for each sequence."""

    def __init__(self, steps: Sequence[SequenceStep], drawn: Drawn, block_size: int) -> None:
        self.steps = steps
        self._drawn = drawn
        self._rows: dict[SequenceName, int] = {name_of(step): row for row, step in enumerate(steps)}
        self._inputs = [step.tokens[0] for step in steps]
        # tables are their owners', who go on with them: what was written where is kept
        self.written = [step.blocks[step.start // block_size] for step in steps]
        self._block_size = block_size

    @property
    def ids(self) -> Tensor:
        """int64 [rows], on the device; -1: nothing could be drawn."""
        return self._drawn.ids

    def learn(self, tokens: Mapping[int, SampledToken]) -> None:
        """What rows of the step before drew."""
        for row, token in enumerate(self._inputs):
            if token < 0 and -1 - token in tokens:
                self._inputs[row] = tokens[-1 - token].token_id

    def rows_of(self, steps: Sequence[SequenceStep]) -> dict[int, int]:
        """Which of `steps`, by index, are queued here, and as which row."""
        return {index: row for index, step in enumerate(steps) if (row := self._row_of(step)) is not None}

    def _row_of(self, step: SequenceStep) -> int | None:
        row = self._rows.get(name_of(step))
        if row is None or not can_run_ahead(step):
            return None
        written = step.blocks[step.start // self._block_size]
        same = (self.steps[row].start, self._inputs[row], self.written[row]) == (step.start, step.tokens[0], written)
        return row if same else None

    def tokens(self, rows: Sequence[int]) -> dict[int, SampledToken]:
        """Wait for these rows' tokens. Raises InternalError for logits that are not numbers."""
        drawn = self._drawn.tokens(rows)
        return {row: drawn[row][0] for row in rows}
