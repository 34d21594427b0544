"""What the simulated model says, and what the simulated KV pools hold.

The next token is a function of all tokens before it and of the choice, so every answer is known in advance. The KV of a
position is a number made of the tokens up to it and the cache salt: who reads a block can tell whose it is (I4, I13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from baton.engine.step import OnLayers, SampledToken, SequenceStep
from baton.proto.kv_layout import KVLayout

from .world import Violation

VOCABULARY = 50
LAYERS = 2
STOP = 0  # the token that ends an answer
Range = tuple[int, int]


@dataclass(slots=True)
class Answer:
    """One choice as it must be: prompt and output end to end, and the KV of each position."""

    tokens: list[int]
    prompt: int
    origins: list[int]

    @property
    def output(self) -> list[int]:
        """The choice's tokens."""
        return self.tokens[self.prompt :]


def answer(prompt: Sequence[int], choice: int, max_tokens: int, salt: str) -> Answer:
    """The whole answer of one choice."""
    tokens, origins, state = [], [], len(salt) + 1
    for token in prompt:
        state = hash((state, token))
        tokens.append(token)
        origins.append(state)
    for _ in range(max_tokens):
        token = hash((state, choice)) % VOCABULARY if hash((state, choice, 1)) % 32 else STOP
        state = hash((state, token))
        tokens.append(token)
        origins.append(state)
        if token == STOP:
            break
    return Answer(tokens, len(prompt), origins)


class Store:
    """One rank's KV pool: a number for each (layer, head, block, token)."""

    def __init__(self, blocks: int, block_size: int, heads: int) -> None:
        self.block_size = block_size
        self.heads = heads
        self.device = SimpleNamespace(type="cpu")
        self.rows = [[0] * (blocks * block_size) for _ in range(LAYERS * heads)]

    def write(self, blocks: Sequence[int], layers: Range, heads: Range, start: int, cells: Sequence[int]) -> None:
        """The same cells for each of these layers and (own) heads, from position `start` on."""
        size = self.block_size
        for layer in range(*layers):
            for head in range(*heads):
                row = self.rows[layer * self.heads + head]
                for at, cell in enumerate(cells, start):
                    row[blocks[at // size] * size + at % size] = cell

    def gather(self, blocks: Sequence[int], layers: Range, heads: Range, tokens: Range) -> list[list[int]]:
        """A copy: the cells of each (layer, head)."""
        size = self.block_size
        places = [blocks[at // size] * size + at % size for at in range(*tokens)]
        rows = [self.rows[layer * self.heads + head] for layer in range(*layers) for head in range(*heads)]
        return [[row[place] for place in places] for row in rows]

    def scatter(
        self, blocks: Sequence[int], layers: Range, heads: Range, tokens: Range, payload: list[list[int]]
    ) -> None:
        """The inverse of `gather`."""
        parts = iter(payload)
        for layer in range(*layers):
            for head in range(*heads):
                self.write(blocks, (layer, layer + 1), (head, head + 1), tokens[0], next(parts))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks as they are, (source, destination)."""
        size = self.block_size
        for source, target in pairs:
            for row in self.rows:
                row[target * size : (target + 1) * size] = row[source * size : (source + 1) * size]

    def check(self, blocks: Sequence[int], origins: Sequence[int], who: object) -> None:
        """Raises Violation unless the first `len(origins)` positions are those."""
        size = self.block_size
        for row in self.rows:
            for number in range(-(-len(origins) // size)):
                due = origins[number * size : (number + 1) * size]
                at = blocks[number] * size
                if row[at : at + len(due)] != due:
                    where = f"block {blocks[number]} ({number} of its table)"
                    raise Violation(f"I4: {who} reads {where}, which is not its own")


class Book:
    """Whose answers are whose; what steps are checked against."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int], Answer] = {}

    def of(self, step: SequenceStep) -> Answer:
        """The answer that the step computes a part of."""
        return self.answers[step.request_id, step.draw.choices[0] if step.draw else step.first_choice]

    def run(self, step: SequenceStep, stores: Sequence[Store]) -> list[SampledToken]:
        """Read what is before the step, check it, and draw; raises Violation for wrong tokens or foreign KV."""
        right = self.of(step)
        if list(step.tokens) != right.tokens[step.start : step.end]:
            raise Violation(f"I2: {step} computes tokens that are not the request's: {right.tokens}")
        for store in stores:
            store.check(step.blocks, right.origins[: step.start], (step.request_id, step.attempt, step.first_choice))
        if step.draw is None:
            return []
        return [self._next(step, choice) for choice in step.draw.choices]

    def _next(self, step: SequenceStep, choice: int) -> SampledToken:
        right = self.answers[step.request_id, choice].tokens
        if step.end >= len(right):
            raise Violation(f"I2: {step} goes on after the end of its answer")
        return SampledToken(choice, right[step.end], None, ())


class _KV:
    def __init__(self, store: Store) -> None:
        self.copy_blocks = store.copy


class Runner:
    """In place of the engine's: rank 0 of a worker, whose followers do what they were told before each step."""

    def __init__(self, book: Book, stores: Sequence[Store], layout: KVLayout, crew: Any) -> None:
        self.vocab_size = VOCABULARY
        self.max_model_len = 10_000
        self.layout = layout
        self.kv = _KV(stores[0])
        self._book = book
        self._stores = stores
        self._crew = crew

    def prefill(self, steps: Sequence[SequenceStep], on_layers: OnLayers) -> list[list[SampledToken]]:
        """One layer after the other, on all ranks."""
        drawn = self._run(steps)
        for layer in range(LAYERS):
            for step in steps:
                self._write(step, (layer, layer + 1))
            on_layers(layer, layer + 1)
            self._crew.push_layers(steps, layer, layer + 1)
        return drawn

    def decode(self, steps: Sequence[SequenceStep]) -> list[list[SampledToken]]:
        """One token for each."""
        drawn = self._run(steps)
        for step in steps:
            self._write(step, (0, LAYERS))
        return drawn

    def _run(self, steps: Sequence[SequenceStep]) -> list[list[SampledToken]]:
        self._crew.catch_up()
        rows = [self._book.run(step, self._stores) for step in steps]
        return [row for step, row in zip(steps, rows, strict=True) if step.draw is not None]

    def _write(self, step: SequenceStep, layers: Range) -> None:
        cells = self._book.of(step).origins[step.start : step.end]
        for store in self._stores:
            store.write(step.blocks, layers, (0, store.heads), step.start, cells)
