"""Which sequences a decode step runs and who must give up blocks: pure, over ids and counts.

Continuous batching: every sequence in the batch runs in every step. A sequence that crosses the edge of its last block
needs one more. When none is free:

1. the newest *fresh* sequence is preempted (it is placed again elsewhere or later, with what it has said so far);
2. a sequence that would have to preempt itself stalls instead: others hold the blocks, and they go on without it.

A sequence that was resumed (it lost its blocks once, or its worker) holds all the blocks it can ever need from the
start: it never asks, and it is never preempted. So a request is preempted at most once on its way to the end, the
oldest fresh sequence always gets what it needs before newer ones, and resumed ones always run: the batch never stops.

Tokens that are proposed ahead (speculative decoding) use what is left: nobody is preempted or kept out for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..proto.leg import LegKey

SequenceId = tuple[LegKey, int]  # leg, choice


class Blocks(Protocol):
    """The pool, as far as scheduling needs it: real block tables in a worker, numbers in a simulator."""

    @property
    def free(self) -> int:
        """Blocks that can be given away now."""
        ...

    def grow(self, sequence: SequenceId) -> None:
        """One more block for this sequence."""
        ...

    def preempt(self, sequence: SequenceId) -> None:
        """Take back the blocks of a sequence that has left the batch."""
        ...


@dataclass(slots=True)
class Sequence:
    """One choice in the batch. Counts are of tokens whose KV is in the pool, and of blocks in its table."""

    id: SequenceId
    tokens: int
    blocks: int
    limit: int  # tokens when it ends at the latest
    resumed: bool

    def short(self, block_size: int) -> bool:
        """Whether the next token has no place."""
        return self.tokens >= self.blocks * block_size


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`run` in batch order; `preempted` have left the batch; `stalled` wait for a block."""

    run: list[SequenceId]
    preempted: list[SequenceId]
    stalled: list[SequenceId]


class DecodeScheduler:
    """The running batch, oldest first."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch: dict[SequenceId, Sequence] = {}

    def __len__(self) -> int:
        return len(self._batch)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._batch

    def __repr__(self) -> str:
        return "DecodeScheduler(" + ", ".join(f"{s.id}: {s.tokens} in {s.blocks}" for s in self._batch.values()) + ")"

    def tokens(self, sequence: SequenceId) -> int:
        """KV tokens of a sequence in the batch."""
        return self._batch[sequence].tokens

    def join(self, sequence: Sequence) -> None:
        """A sequence whose KV is complete joins the batch."""
        self._batch[sequence.id] = sequence

    def leave(self, sequence: SequenceId) -> None:
        """A sequence ended or was cancelled; an unknown one is no error."""
        self._batch.pop(sequence, None)

    def plan(self, blocks: Blocks) -> StepPlan:
        """The next step, after taking from `blocks` what it needs."""
        plan = StepPlan([], [], [])
        for sequence in list(self._batch.values()):
            if sequence.id not in self._batch:
                continue  # preempted in favour of an older one
            if sequence.short(self._block_size) and not self._make_room(sequence, blocks, plan):
                plan.stalled.append(sequence.id)
            else:
                plan.run.append(sequence.id)
        return plan

    def _make_room(self, sequence: Sequence, blocks: Blocks, plan: StepPlan) -> bool:
        while blocks.free < 1:
            victim = next((s for s in reversed(self._batch.values()) if not s.resumed), sequence)
            if victim is sequence:
                return False
            del self._batch[victim.id]
            plan.preempted.append(victim.id)
            blocks.preempt(victim.id)
        blocks.grow(sequence.id)
        sequence.blocks += 1
        return True

    def look_ahead(self, blocks: Blocks, lengths: Mapping[SequenceId, int]) -> None:
        """After `plan`: room for so many more tokens of a sequence than the next one, as far as there is any.

        A block is taken only while as many others stay free as there are sequences: each may need one in the next step.
        A sequence that takes one early does not take it later, so it is ahead by a block at most.
        """
        for name, length in lengths.items():
            sequence = self._batch[name]
            wanted = min(sequence.tokens + 1 + length, sequence.limit)
            while wanted > sequence.blocks * self._block_size and blocks.free > len(self._batch):
                blocks.grow(name)
                sequence.blocks += 1

    def advance(self, sequences: Iterable[SequenceId], steps: int) -> None:
        """`steps` steps ran for these sequences; those that have left meanwhile are skipped."""
        for name in sequences:
            if (sequence := self._batch.get(name)) is not None:
                sequence.tokens += steps

    def growth(self, steps: int) -> int:
        """Blocks that the whole batch takes in its next `steps` steps, if it gets them."""
        size = self._block_size
        return sum(max(0, -(-(s.tokens + steps) // size) - s.blocks) for s in self._batch.values())

    def fast_forward(self, blocks: Blocks, steps: int) -> list[SequenceId]:
        """What `plan` and `advance` of all by turns, `steps` times, come to where `growth(steps)` blocks are free and
        nobody passes its limit. Returns the sequences that have reached it, in batch order."""
        size = self._block_size
        ended: list[SequenceId] = []
        for sequence in self._batch.values():
            sequence.tokens = tokens = sequence.tokens + steps
            while tokens > sequence.blocks * size:
                blocks.grow(sequence.id)
                sequence.blocks += 1
            if tokens >= sequence.limit:
                ended.append(sequence.id)
        return ended

    def steps_to_end(self) -> int:
        """Steps of the whole batch until the first sequence is at its limit; 0 for an empty batch."""
        return min([s.limit - s.tokens for s in self._batch.values()], default=0)

    def steps_until_event(self) -> int:
        """Steps that can be merged into one `advance`: until a sequence ends or needs a block; 0 for an empty batch."""
        counts = [
            min(max(s.limit - s.tokens, 1), max(s.blocks * self._block_size - s.tokens, 1))
            for s in self._batch.values()
        ]
        return min(counts, default=0)
