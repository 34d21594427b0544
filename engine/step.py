"""One engine step as plain data: which tokens of which sequences run, and what is drawn afterwards.

The leader builds the steps, packs them for its followers (without the draws: only rank 0 samples) and every rank runs
the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack

from ..proto.errors import BatonError
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


@dataclass(slots=True)
class PromptScores:
    """Asks what the model thinks of given tokens; the runner fills in `found`, one entry for each target."""

    targets: Sequence[int]  # what follows each of the step's tokens; behind the last one of the prompt comes nothing
    top: int  # alternatives beside each
    found: list[TokenScore] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log probability of a given token, and the likeliest ones (id, log probability), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token. `logprob` and `top` (best first) are of the raw logits; None and () unless asked for.

    `error`: nothing could be drawn, for a reason that is the request's own; there is no token then.
    """

    choice: int
    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    error: BatonError | None = None


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
    scores: PromptScores | None = None  # never together with proposals

    @property
    def end(self) -> int:
        """Tokens of the sequence after this step; without proposals the position of the token that is drawn."""
        return self.start + len(self.tokens)

    @property
    def logit_rows(self) -> range:
        """Which of `tokens` want a row of logits: those that are drawn from; all of them where they are scored."""
        return range(0 if self.scores else len(self.tokens) - self.draw_rows, len(self.tokens))

    @property
    def draw_rows(self) -> int:
        """Rows of logits that are drawn from: none without a draw, else one, and one for each proposal."""
        return 1 + self.proposed if self.draw else 0


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
_SCORED_BY_LEADER = PromptScores(targets=(), top=0)


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
            s.scores is not None,
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
    request_id, attempt, first_choice, tokens, start, blocks, drawn, proposed, scored = row
    draw = DRAWN_BY_LEADER if drawn else None
    scores = _SCORED_BY_LEADER if scored else None
    return SequenceStep(request_id, attempt, first_choice, tokens, start, blocks, draw, proposed, scores)
