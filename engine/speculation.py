"""Speculative decoding of one engine: how many tokens to propose, who proposes them, and what became of it.

    lengths(names) -> room for them is found in the pool -> extend(steps) -> the runner -> observe(steps, drawn)

Each step of one engine goes through all four, in this order. What comes out is what would come out without it
(verify.py), only in fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .proposal_length import Costs, Record, learn, next_length, reading_pays
from .proposer import Proposer, SequenceName, Wanted
from .step import Draw, SampledToken, SequenceStep

Allowed = Callable[[SequenceStep, Sequence[int]], Sequence[int]]


def _everything(step: SequenceStep, proposals: Sequence[int]) -> Sequence[int]:
    return proposals


class Speculator:
    """`longest`: proposals of one sequence in one step, at most. The three counters only grow.

    allowed: of the tokens that are proposed to follow a step, those that its grammar lets stand (guide.py).
    """

    def __init__(
        self, proposer: Proposer, costs: Costs, longest: int, block_size: int, allowed: Allowed = _everything
    ) -> None:
        self.drafts = 0  # steps of a sequence with proposals
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self._proposer = proposer
        self.costs = costs
        self._longest = longest
        self._block_size = block_size
        self._allowed = allowed
        self._records: dict[SequenceName, Record] = {}

    def lengths(self, names: Sequence[SequenceName]) -> Mapping[SequenceName, int]:
        """How many tokens may be proposed for each sequence of the next step; all others are forgotten."""
        batch = len(names)
        known = self._records
        self._records = {n: next_length(known.get(n, Record()), batch, self.costs, self._longest) for n in names}
        self._proposer.keep(self._records)
        return {name: record.length for name, record in self._records.items()}

    def extend(self, steps: Sequence[SequenceStep]) -> list[SequenceStep]:
        """The same steps with proposals: as many as fit the blocks and what the request may still say."""
        counts = {index: count for index, step in enumerate(steps) if (count := self._count(step)) > 0}
        wanted = [Wanted(name_of(steps[i]), draw, n) for i, n in counts.items() if (draw := steps[i].draw)]
        extended = list(steps)
        for index, tokens in zip(counts, self._proposer.propose(wanted) if wanted else (), strict=True):
            step = steps[index]
            kept = self._allowed(step, tokens)
            extended[index] = replace(step, tokens=[*step.tokens, *kept], proposed=len(kept))
        return extended

    def observe(self, steps: Sequence[SequenceStep], drawn: Sequence[Sequence[SampledToken]]) -> None:
        """What the runner made of extended steps: one row of tokens for each that draws."""
        for step, row in zip((step for step in steps if step.draw), drawn, strict=True):
            record = self._records.get(name_of(step))
            if record is None:
                continue
            accepted = len(row) - 1 if step.proposed else 0
            self._records[name_of(step)] = learn(record, step.proposed, accepted)
            self.drafts += step.proposed > 0
            self.draft_tokens += step.proposed
            self.accepted_tokens += accepted

    def _count(self, step: SequenceStep) -> int:
        draw, record = step.draw, self._records.get(name_of(step))
        if draw is None or record is None or not draw.generated or len(step.tokens) > 1:
            return 0
        room = len(step.blocks) * self._block_size - step.end
        left = draw.params.max_tokens - len(draw.generated) - 1  # the step draws one in any case
        return min(record.length, room, left) if self._is_read(step, draw, record) else 0

    def _is_read(self, step: SequenceStep, draw: Draw, record: Record) -> bool:
        """Whether the proposer knows the sequence, or would gain by learning to know it."""
        unread, said = self._proposer.unread(name_of(step), len(draw.prompt)), len(draw.generated)
        left = draw.params.max_tokens - said
        return not unread or reading_pays(record, len(self._records), self.costs, unread, said, left)


def name_of(step: SequenceStep) -> SequenceName:
    """Of a step with one choice; of one with several, or none that is drawn, that of its first."""
    choice = step.draw.choices[0] if step.draw and step.draw.choices else step.first_choice
    return (step.request_id, step.attempt, step.first_choice), choice
