"""One engine step as plain data: which tokens of which sequences run, and what is drawn afterwards.

The leader builds the steps, packs them for its followers (without the draws: only rank 0 samples) and every rank runs
the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from ..proto.sampling import SamplingParams

Kind = Literal["prefill", "decode"]
OnLayers = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Draw:
    """What to draw from the logits after the last token of a step.

    One row of logits serves every choice in `choices`: the first token of n choices comes from one prefill. `generated`
    is then empty; a decode step has one choice, and `generated` holds all its output so far, the step's input included
    (without what is only proposed).
    """

    params: SamplingParams
    choices: tuple[int, ...]
    prompt: Sequence[int]
    generated: Sequence[int]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token. `logprob` and `top` (best first) are of the raw logits; None and () unless asked for."""

    choice: int
    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The part of one sequence that runs in one step.

    `tokens` stand at absolute positions start, start + 1, ...; their KV goes to `blocks`, where blocks[i] holds the
    sequence's tokens [i * block_size, (i + 1) * block_size). `blocks` covers at least start + len(tokens) tokens.
    The last `proposed` tokens are guesses: each is drawn anew from the row before it (see verify.py).
    """

    request_id: str
    attempt: int
    first_choice: int
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    draw: Draw | None
    proposed: int = 0

    @property
    def end(self) -> int:
        """Tokens of the sequence after this step; without proposals the position of the token that is drawn."""
        return self.start + len(self.tokens)

    @property
    def logit_rows(self) -> range:
        """Which of `tokens` want a row of logits: none without a draw, else the last one, and one for each proposal."""
        return range(len(self.tokens) - 1 - self.proposed if self.draw else len(self.tokens), len(self.tokens))


_NEUTRAL = SamplingParams(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={},
    seed=0,
    n=1,
    max_tokens=1,
    min_tokens=0,
    stop_token_ids=frozenset(),
    logprobs=None,
)
# On a follower: the row of logits is computed, and rank 0 draws from it.
DRAWN_BY_LEADER = Draw(params=_NEUTRAL, choices=(), prompt=(), generated=())


def pack_plan(kind: Kind, steps: Sequence[SequenceStep]) -> bytes:
    """A step for the followers: everything but the draws themselves."""
    rows = [
        (
            s.request_id,
            s.attempt,
            s.first_choice,
            list(s.tokens),
            s.start,
            list(s.blocks),
            s.draw is not None,
            s.proposed,
        )
        for s in steps
    ]
    return bytes(msgpack.packb((kind, rows)))


def unpack_plan(data: bytes) -> tuple[Kind, list[SequenceStep]]:
    """The inverse of `pack_plan`; where the leader draws, `draw` is DRAWN_BY_LEADER. Raises ValueError."""
    try:
        kind, rows = msgpack.unpackb(data)
        steps = [_unpack_step(row) for row in rows]
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not a step plan: {error}") from error
    if kind not in ("prefill", "decode"):
        raise ValueError(f"not a step plan: kind {kind!r}")
    return kind, steps


def _unpack_step(row: Sequence[Any]) -> SequenceStep:
    request_id, attempt, first_choice, tokens, start, blocks, drawn, proposed = row
    draw = DRAWN_BY_LEADER if drawn else None
    return SequenceStep(request_id, attempt, first_choice, tokens, start, blocks, draw, proposed)
