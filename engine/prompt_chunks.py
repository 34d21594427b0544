"""A chunk of a leg's prompt as a part of a step, for whoever computes prompts: prefill workers, and decode workers."""

from __future__ import annotations

from collections.abc import Sequence

from ..proto import worker_pb2 as pb
from ..proto.leg import Leg, LegKey, ref_of
from .prefill_scheduler import Chunk
from .step import Draw, PromptScores, SequenceStep


def step_of(leg: Leg, chunk: Chunk, blocks: Sequence[int]) -> SequenceStep:
    """The chunk, in these blocks; a prompt's last one draws the first token of all its choices."""
    last = chunk.stop == leg.length
    return SequenceStep(
        *leg.key,
        tokens=leg.tokens[chunk.start : chunk.stop],
        start=chunk.start,
        blocks=blocks,
        draw=Draw(leg.sampling, leg.choices, leg.prompt, leg.generated) if last else None,
        scores=_scores(leg, chunk),
    )


def reusable(leg: Leg) -> list[int]:
    """The tokens whose KV may come from elsewhere: not those whose logits are wanted, hence never the last one."""
    return leg.tokens[:-1] if leg.sampling.prompt_logprobs is None else []


def scores_event(key: LegKey, start: int, scores: PromptScores) -> pb.WorkerEvent:
    """What the model thinks of the prompt's tokens behind those of a chunk that begins at `start`."""
    message = pb.PromptScores(leg=ref_of(key), start=start + 1)
    for score in scores.found:
        top = [pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in score.top]
        message.scores.add(logprob=score.logprob, top=top)
    return pb.WorkerEvent(prompt_scores=message)


def _scores(leg: Leg, chunk: Chunk) -> PromptScores | None:
    """What is asked about the prompt's tokens behind those of the chunk."""
    top = leg.sampling.prompt_logprobs
    targets = leg.prompt[chunk.start + 1 : chunk.stop + 1]
    return None if top is None or not targets else PromptScores(targets, top)
