"""Which proposed tokens stand: those that the model itself draws. Pure.

A step's input x and proposals g1 .. gk run as one causal chunk, so row j's logits are those that follow x, g1 .. gj.
The noise of a draw depends on seed, choice and position alone (sampler.py): row 0 draws what a step without proposals
would; while the draw equals the next proposal, the next row's history is the true one, and its draw is what the next
step would have drawn. The first draw that differs is still right, and what follows it is dropped. So the tokens are the
same with and without proposals, greedy or not, and no rejection sampling is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .step import Draw, SampledToken, SequenceStep


def draws_of(step: SequenceStep) -> list[Draw]:
    """One draw for each of the step's rows of logits; each sees the proposals before its row as generated."""
    if step.draw is None:
        return []
    if not step.proposed:
        return [step.draw]
    known, guesses = list(step.draw.generated), list(proposals_of(step))
    return [replace(step.draw, generated=known + guesses[:row]) for row in range(step.proposed + 1)]


def proposals_of(step: SequenceStep) -> Sequence[int]:
    """The tokens that were proposed."""
    return step.tokens[len(step.tokens) - step.proposed :]


def accept(steps: Sequence[SequenceStep], sampled: Sequence[list[SampledToken]]) -> list[list[SampledToken]]:
    """From one entry for each row of logits to one for each step that draws.

    A step without proposals keeps its tokens, one for each choice; one with proposals keeps the draws up to and with
    the first that is not what was proposed, or all of them.
    """
    rows = iter(sampled)
    return [_accept(step, rows_of) for step in steps if (rows_of := [next(rows) for _ in range(step.draw_rows)])]


def _accept(step: SequenceStep, rows: Sequence[list[SampledToken]]) -> list[SampledToken]:
    if not step.proposed:
        return rows[0]
    kept: list[SampledToken] = []
    for (drawn,), guess in zip(rows, [*proposals_of(step), None], strict=True):
        if kept and drawn.error:
            break  # the next step says so
        kept.append(drawn)
        if drawn.token_id != guess:
            break
    return kept
