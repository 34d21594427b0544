"""Which prompts a step computes, and how much of each: pure, over ids and token counts.

**The rule.** Half of a step's tokens go to the oldest unfinished prompt, the other half to the prompts with the fewest
tokens left (the older first among equals). What one half does not need goes to the other.

So a short prompt never waits behind a long one: whatever arrived earlier, it shares half of every step with only those
that are shorter still. And a long one always ends: once it is the oldest it has half the worker, however many short
ones keep coming (no reverse starvation). Prompts of equal length run one after another, which is best for their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..proto.leg import LegKey


class Chunk(NamedTuple):
    """Tokens [start, stop) of one prompt."""

    key: LegKey
    start: int
    stop: int


@dataclass(slots=True)
class _Prompt:
    tokens: int
    computed: int

    @property
    def left(self) -> int:
        return self.tokens - self.computed


class PrefillScheduler:
    """The prompts that have their blocks and are not computed to the end."""

    def __init__(self, max_batch_tokens: int) -> None:
        self._budget = max_batch_tokens
        self._prompts: dict[LegKey, _Prompt] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._prompts)

    def __repr__(self) -> str:
        parts = ", ".join(f"{key}: {p.computed}/{p.tokens}" for key, p in self._prompts.items())
        return f"PrefillScheduler({parts})"

    @property
    def tokens_left(self) -> int:
        """Tokens still to compute, over all prompts."""
        return sum(prompt.left for prompt in self._prompts.values())

    def add(self, key: LegKey, tokens: int, computed: int) -> None:
        """A prompt joins; its first `computed` tokens (fewer than `tokens`) are in the pool already."""
        if not 0 <= computed < tokens:
            raise ValueError(f"{key}: {computed} of {tokens} tokens are computed")
        self._prompts[key] = _Prompt(tokens, computed)

    def remove(self, key: LegKey) -> None:
        """Forget a prompt; an unknown one is no error."""
        self._prompts.pop(key, None)

    def rename(self, key: LegKey, new: LegKey) -> None:
        """A prompt goes on under another key, in its old place; an unknown one is no error."""
        self._prompts = {(new if known == key else known): prompt for known, prompt in self._prompts.items()}

    def done(self, key: LegKey) -> int | None:
        """Tokens of a prompt that are computed; None: it is not here (any more)."""
        prompt = self._prompts.get(key)
        return None if prompt is None else prompt.computed

    def plan(self) -> list[Chunk]:
        """The next step's chunks, at most one for each prompt; [] when there is nothing to compute."""
        if not self._prompts:
            return []
        oldest = next(iter(self._prompts))
        shares = {oldest: min(self._prompts[oldest].left, max(1, self._budget // 2))}
        budget = self._budget - shares[oldest]
        for key, prompt in sorted(self._prompts.items(), key=lambda item: item[1].left):  # stable: older first
            part = min(prompt.left - shares.get(key, 0), budget)
            if part > 0:
                shares[key] = shares.get(key, 0) + part
                budget -= part
        left_over = min(budget, self._prompts[oldest].left - shares[oldest])
        shares[oldest] += left_over
        return [Chunk(key, (p := self._prompts[key]).computed, p.computed + share) for key, share in shares.items()]

    def computed(self, chunks: Sequence[Chunk]) -> list[LegKey]:
        """A planned step ran. Returns the prompts that are now complete (and forgotten); gone ones are skipped."""
        complete = []
        for chunk in chunks:
            prompt = self._prompts.get(chunk.key)
            if prompt is None or prompt.computed != chunk.start:
                continue
            prompt.computed = chunk.stop
            if not prompt.left:
                del self._prompts[chunk.key]
                complete.append(chunk.key)
        return complete

    def steps_until_event(self) -> int:
        """Steps of which only the last can complete a prompt, if none comes or goes meanwhile; 0 without prompts."""
        if not self._prompts:
            return 0
        return -(-min(prompt.left for prompt in self._prompts.values()) // self._budget)

    def advance(self, steps: int) -> list[LegKey]:
        """Run `steps` planned steps at once (simulator); returns the prompts that completed, in order."""
        complete: list[LegKey] = []
        for _ in range(steps):
            complete += self.computed(self.plan())
        return complete
