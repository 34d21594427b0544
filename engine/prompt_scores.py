"""What the model thinks of a prompt's own tokens, from the rows of logits in front of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .step import PromptScores, SequenceStep, TokenScore

_ROWS = 32  # rows in float32 at a time


def take_scores(steps: Sequence[SequenceStep], logits: Tensor) -> Tensor:
    """Fill in the scores that the steps ask for. Returns the rows that are drawn from, of `logits` [R, vocab]."""
    if all(step.scores is None for step in steps):
        return logits
    drawn: list[int] = []
    at = 0
    for step in steps:
        rows = len(step.logit_rows)
        if step.scores is not None:
            _fill(step.scores, logits[at : at + len(step.scores.targets)])
        at += rows
        drawn += range(at - step.draw_rows, at)
    return logits[torch.tensor(drawn, dtype=torch.int64, device=logits.device)]


def _fill(scores: PromptScores, logits: Tensor) -> None:
    targets = torch.tensor(list(scores.targets), dtype=torch.int64, device=logits.device)
    top = min(scores.top, logits.shape[1])
    for low in range(0, len(logits), _ROWS):
        part = logits[low : low + _ROWS].float()
        total = part.logsumexp(1, keepdim=True)
        own = (part.gather(1, targets[low : low + _ROWS, None]) - total)[:, 0].tolist()
        values, ids = part.topk(top, dim=1)
        best = zip(ids.tolist(), (values - total).tolist(), strict=True)
        scores.found += [
            TokenScore(logprob, tuple(zip(*pair, strict=True))) for logprob, pair in zip(own, best, strict=True)
        ]
