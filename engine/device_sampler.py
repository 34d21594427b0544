"""Drawing tokens on a GPU as sampler.py does, without waiting for it: one copy brings settings, one brings tokens back.

Penalties, bias and masks change a copy of the logits; the draw is kernels/gpu/sampling.py's; log probabilities are of
the raw logits. Of proposals the device says how many draws stand (kernels/gpu/verify.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from ..proto.errors import BatonError, InternalError
from .device_edge import Download, Edge, upload
from .sampler import keys_of
from .step import Draw, SampledToken, SequenceStep
from .verify import draws_of, proposals_of

_LOW = (1 << 32) - 1


@dataclass(slots=True)
class _Changes:
    """Places in the logits, seen as one row, and what happens there, in this order."""

    repeated: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)  # a negative logit is multiplied, another is divided
    added: list[int] = field(default_factory=list)
    amounts: list[float] = field(default_factory=list)
    biased: list[int] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)

    def note(self, start: int, vocab: int, draw: Draw) -> None:
        """What `draw` asks for, in the row that begins at `start`."""
        params = draw.params
        if params.repetition_penalty != 1:
            seen = {*draw.prompt, *draw.generated}
            self.repeated += [start + token for token in seen]
            self.factors += [params.repetition_penalty] * len(seen)
        if draw.generated and (params.presence_penalty != 0 or params.frequency_penalty != 0):
            for token, count in Counter(draw.generated).items():
                self.added.append(start + token)
                self.amounts.append(-(params.presence_penalty + params.frequency_penalty * count))
        for token, bias in params.logit_bias.items():
            self.biased.append(start + token)
            self.biases.append(bias)
        if len(draw.generated) < params.min_tokens:
            self.masked += [start + token for token in params.stop_token_ids if token < vocab]

    def any(self) -> bool:
        """Whether there is something to change."""
        return bool(self.repeated or self.added or self.biased or self.masked)

    def tensors(self) -> list[Tensor]:
        """For `apply`."""
        places = (self.repeated, self.added, self.biased, self.masked)
        values = (self.factors, self.amounts, self.biases)
        return [*(_longs(part) for part in places), *(torch.tensor(part, dtype=torch.float32) for part in values)]


def _apply(logits: Tensor, changes: Sequence[Tensor]) -> Tensor:
    """A float32 copy of `logits` with the changes."""
    repeated, added, biased, masked, factors, amounts, biases = changes
    result = logits.to(torch.float32, copy=True)
    flat = result.view(-1)
    if len(repeated):
        values = flat[repeated]
        flat[repeated] = torch.where(values < 0, values * factors, values / factors)
    for places, values in ((added, amounts), (biased, biases)):
        if len(places):
            flat[places] += values
    if len(masked):
        flat[masked] = -math.inf
    return result


class Drawn:
    """The tokens of a step, on their way to the host."""

    def __init__(
        self,
        edge: Edge,
        steps: Sequence[SequenceStep],
        draws: Sequence[Draw],
        logits: Tensor,
        allowed: Mapping[int, Tensor | BatonError],
    ) -> None:
        self._steps, self._draws = steps, draws
        self._errors = {row: reason for row, reason in allowed.items() if isinstance(reason, BatonError)}
        self._masks = {row: mask for row, mask in allowed.items() if isinstance(mask, Tensor)}
        self._wanted = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None and draw.choices]
        self._results = self._queue(edge, logits) if draws else []
        self._download = Download(edge, self._results) if draws else None

    @property
    def ids(self) -> Tensor:
        """The tokens on the device, int64 [one for each choice of each draw]; -1: nothing could be drawn."""
        return self._results[0]

    def _queue(self, edge: Edge, logits: Tensor) -> list[Tensor]:
        from ..kernels.gpu.sampling import sample
        from ..kernels.gpu.verify import verify

        vocab = logits.shape[1]
        settings = [draw.params for draw in self._draws]
        pairs = [(row, key) for row, draw in enumerate(self._draws) for key in keys_of(draw)]
        floats = [[getattr(params, name) for params in settings] for name in ("temperature", "top_p", "min_p")]
        changes = _Changes()
        for row, draw in enumerate(self._draws):
            changes.note(row * vocab, vocab, draw)
        up = upload(
            edge,
            [
                torch.tensor(floats, dtype=torch.float32),
                torch.tensor([min(params.top_k, vocab) for params in settings], dtype=torch.int32),
                torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t().contiguous(),
                _longs(self._wanted),
                _longs(list(self._masks)),
                self._allowed(vocab),
                *self._proposals(),
                *changes.tensors(),
            ],
        )
        (temperatures, top_p, min_p), top_k, (rows, keys), wanted, masked, masks, *rest = up
        at, proposed, lengths, *places = rest
        scores = _apply(logits, places) if changes.any() or self._masks else logits.float()
        if self._masks:
            scores[masked] = scores[masked].masked_fill_(~masks, -math.inf)
        tokens = sample(scores, temperatures, top_k, top_p, min_p, rows, keys)
        counts = verify(tokens[at], proposed, lengths)[1] if len(lengths) else lengths
        return [tokens, counts, *self._logprobs(logits, tokens, rows, wanted)]

    def _allowed(self, vocab: int) -> Tensor:
        """What masks leave, bool [masks, vocabulary]; ids without a spelling are behind a mask's end."""
        result = torch.zeros(len(self._masks), vocab, dtype=torch.bool)
        for row, mask in zip(result, self._masks.values(), strict=True):
            row[: len(mask)] = mask[:vocab]
        return result

    def _proposals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of steps with proposals: which draws belong to each [S, K + 1], the proposals [S, K], and how many [S]."""
        steps, firsts, row = [], [], 0
        for step in self._steps:
            if step.draw is not None:
                if step.proposed:
                    steps.append(step)
                    firsts.append(row)
                row += step.proposed + 1
        width = max((step.proposed for step in steps), default=0)
        # a step with proposals has one choice: its draws are neighbours; the last one stands for those that it lacks
        starts = [sum(len(draw.choices) for draw in self._draws[:first]) for first in firsts]
        ends = [start + step.proposed for start, step in zip(starts, steps, strict=True)]
        at = [[min(start + k, end) for k in range(width + 1)] for start, end in zip(starts, ends, strict=True)]
        guesses = [[*proposals_of(step), *[-1] * (width - step.proposed)] for step in steps]
        lengths = torch.tensor([step.proposed for step in steps], dtype=torch.int32)
        return _longs(at).view(len(steps), width + 1), _longs(guesses).view(len(steps), width), lengths

    def _logprobs(self, logits: Tensor, tokens: Tensor, rows: Tensor, wanted: Tensor) -> list[Tensor]:
        """Where rows want them: the logits of all drawn tokens, and of each wanted row the sum and its best tokens."""
        if not self._wanted:
            return []
        chosen = logits[rows, tokens.clamp_min(0)].float()
        raw = logits[wanted].float()
        count = min(max(self._draws[row].params.logprobs or 0 for row in self._wanted), raw.shape[1])
        bits = raw.view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
        ids = torch.arange(raw.shape[1], device=raw.device)
        best = _LOW - (((ordered << 32) + (_LOW - ids)).topk(count, dim=1).values & _LOW)  # of equals, the lowest ids
        return [chosen, raw.logsumexp(1), best, raw.gather(1, best)]

    def tokens(self, asked: Sequence[int] | None = None) -> list[list[SampledToken]]:
        """Wait for them: what `accept` (verify.py) makes of the draws, for each step that draws.

        `asked`: the tokens that anybody wants, else all. Raises InternalError where one of them was drawn from logits
        that are not numbers.
        """
        if self._download is None:
            return []
        ids, counts, *described = self._download.wait()
        drawn = [int(token) for token in ids.tolist()]
        if any(drawn[index] == -1 for index in (range(len(drawn)) if asked is None else asked)):
            raise InternalError("the model's logits are not numbers, or every token is masked")
        rows = iter(self._describe(drawn, described))
        kept = iter(counts.tolist())
        result: list[list[SampledToken]] = []
        for step in self._steps:
            if step.draw is None:
                continue
            own = [next(rows) for _ in range(step.proposed + 1)]
            result.append(_standing([row[0] for row in own[: next(kept)]]) if step.proposed else own[0])
        return result

    def _describe(self, drawn: list[int], described: list[Tensor]) -> list[list[SampledToken]]:
        result: list[list[SampledToken]] = []
        numbers = {row: index for index, row in enumerate(self._wanted)}
        start = 0
        for row, draw in enumerate(self._draws):
            own = range(start, start + len(draw.choices))
            start = own.stop
            if (reason := self._errors.get(row)) is not None:
                result.append([SampledToken(choice, 0, None, (), reason) for choice in draw.choices])
                continue
            if row not in numbers:
                result.append([SampledToken(c, drawn[i], None, ()) for c, i in zip(draw.choices, own, strict=True)])
                continue
            chosen, totals, best, values = described
            index, count = numbers[row], draw.params.logprobs or 0
            total = float(totals[index])
            ids, logits = best[index].tolist()[:count], values[index].tolist()[:count]
            top = tuple((token, value - total) for token, value in zip(ids, logits, strict=True))
            result.append(
                [
                    SampledToken(choice, drawn[i], float(chosen[i]) - total, top)
                    for choice, i in zip(draw.choices, own, strict=True)
                ]
            )
        return result


def drawn(
    edge: Edge,
    steps: Sequence[SequenceStep],
    logits: Tensor,
    allowed: Mapping[int, Tensor | BatonError] = MappingProxyType({}),
) -> Drawn:
    """Queue the draws of `steps` from their rows of logits [R, vocabulary]; `allowed` as in sampler.py."""
    return Drawn(edge, steps, [draw for step in steps for draw in draws_of(step)], logits, allowed)


def _standing(tokens: list[SampledToken]) -> list[SampledToken]:
    """Up to the first that could not be drawn: the next step says so."""
    bad = next((index for index, token in enumerate(tokens) if token.error), len(tokens))
    return tokens[: max(1, bad)]


def _longs(numbers: Sequence[object]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
