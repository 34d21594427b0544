"""What the simulated model says, and what the simulated KV pools hold.

The next token is a function of all tokens before it and of the choice, so every answer is known in advance. The KV of a
position is a number made of the tokens up to it and the cache salt: who reads a block can tell whose it is (I4, I13).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from baton.engine.guide import Guide
from baton.engine.proposer import SequenceName, Wanted
from baton.engine.step import OnLayers, SampledToken, SequenceStep
from baton.engine.verify import accept
from baton.proto.kv_layout import KVLayout

from .world import Violation

VOCABULARY = 50
LAYERS = 2
STOP = 0  # the token that ends an answer
_NOBODYS = -1  # KV that no request can have
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

    def run(self, step: SequenceStep, stores: Sequence[Store]) -> list[list[SampledToken]]:
        """Read what is before the step, check it, and draw from each row of logits; raises Violation for wrong tokens,
        other than proposals, or foreign KV."""
        right = self.of(step)
        known = len(step.tokens) - step.proposed
        if list(step.tokens[:known]) != right.tokens[step.start : step.start + known]:
            raise Violation(f"I2: {step} computes tokens that are not the request's: {right.tokens}")
        for store in stores:
            store.check(step.blocks, right.origins[: step.start], (step.request_id, step.attempt, step.first_choice))
        rows = [step.start + row + 1 for row in step.logit_rows]
        choices = step.draw.choices if step.draw else ()
        return [[self._next(step, choice, place, place == rows[0]) for choice in choices] for place in rows]

    def _next(self, step: SequenceStep, choice: int, place: int, sure: bool) -> SampledToken:
        """The token at `place`. Behind proposals (not `sure`) an answer may be over, and anything is drawn."""
        right = self.answers[step.request_id, choice].tokens
        if place >= len(right) and sure:
            raise Violation(f"I2: {step} goes on after the end of its answer")
        return SampledToken(choice, right[place] if place < len(right) else STOP, None, ())


class Guesses:
    """A `Proposer` that is right most of the time, also beyond the end of an answer."""

    def __init__(self, book: Book, rng: random.Random) -> None:
        self._book = book
        self._rng = rng

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """See Proposer."""
        return [[self._guess(one, step) for step in range(self._rng.randint(0, one.count))] for one in wanted]

    def unread(self, name: SequenceName, prompt: int) -> int:
        """See Proposer."""
        return 0

    def keep(self, names: Collection[SequenceName]) -> None:
        """Nothing is remembered."""

    def _guess(self, one: Wanted, step: int) -> int:
        (request, _, _), choice = one.name
        right, place = self._book.answers[request, choice].tokens, len(one.draw.prompt) + len(one.draw.generated) + step
        return right[place] if place < len(right) and self._rng.random() < 0.8 else STOP


class _KV:
    def __init__(self, store: Store) -> None:
        self.copy_blocks = store.copy


def _no_vocabulary() -> Any:
    raise Violation("a grammar in a world that has none")


class Runner:
    """In place of the engine's: rank 0 of a worker, whose followers do what they were told before each step."""

    ahead = 0  # a step is run when it is asked for

    def __init__(self, book: Book, stores: Sequence[Store], layout: KVLayout, crew: Any) -> None:
        self.vocab_size = VOCABULARY
        self.max_model_len = 10_000
        self.layout = layout
        self.kv = _KV(stores[0])
        self.guide = Guide(_no_vocabulary)
        self._book = book
        self._stores = stores
        self._crew = crew

    def prefill(self, steps: Sequence[SequenceStep], on_layers: OnLayers | None) -> list[list[SampledToken]]:
        """One layer after the other, on all ranks."""
        if on_layers is None:
            return self.decode(steps)
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
        return accept(steps, [row for step in steps for row in self._book.run(step, self._stores)])

    def _write(self, step: SequenceStep, layers: Range) -> None:
        """KV of a proposal that is not the request's token is nobody's."""
        right = self._book.of(step)
        cells, known = right.origins[step.start : step.end], right.tokens[step.start : step.end]
        cells += [_NOBODYS] * (len(step.tokens) - len(cells))
        wrong = next((at for at, token in enumerate(step.tokens) if known[at : at + 1] != [token]), len(cells))
        cells[wrong:] = [_NOBODYS] * (len(cells) - wrong)
        for store in self._stores:
            store.write(step.blocks, layers, (0, store.heads), step.start, cells)
