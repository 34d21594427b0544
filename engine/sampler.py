"""Drawing tokens from logits, without state: the noise of a token is a function of (seed, choice, position, token id).

So a request's tokens do not depend on what else is in the batch, on the worker, or on how often it was moved. The
order of the steps is the usual one: penalties, bias and masks; temperature; then top-k, top-p over what top-k left, and
min-p relative to the best token. All three keep whole groups of equal logits, so the order of equals does not matter.

The draw is argmax(p / e) with e exponential, which is exact. To spare the noise of a whole vocabulary it is done twice:
among blocks of neighbouring token ids with their summed probabilities, then among the tokens of the chosen block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ..kernels.argmax import argmax
from ..proto.errors import BatonError, InternalError
from ..proto.sampling import SamplingParams
from .step import Draw, SampledToken

_BLOCK = 256  # token ids drawn together; part of what a seed means, like the constants of the noise
_ROWS = 16  # rows drawn from at a time: a few MiB, which a CPU's cache holds
_COLDEST = 1e-30  # a smaller temperature would be zero in float32
_PIECE = 32  # token ids looked at together in search of the highest
_WIDTHS = (64, 256, 4096, 1 << 40)  # candidates that top-k and top-p look at, until they know
_EVERYTHING: Mapping[int, Tensor | BatonError] = MappingProxyType({})
_MASK64 = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample(
    logits: Tensor, draws: Sequence[Draw], allowed: Mapping[int, Tensor | BatonError] = _EVERYTHING
) -> list[list[SampledToken]]:
    """Draw from row i of `logits` [R, vocab], not changed, what draws[i] asks for, one token a choice.

    The logits are float32 or bfloat16; all but comparing is done in float32. allowed[i]: the ids that may be drawn
    from row i, bool [vocab or less, then nothing behind is allowed], or why nothing can be: that is its tokens' error.

    Raises InternalError for logits that are not numbers, and ValueError when rows and draws do not pair up.
    """
    if logits.shape[0] != len(draws):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(draws)} draws")
    ids: list[list[int]] = [[] for _ in draws]
    adjusted = _adjust(logits, draws, allowed)
    greedy = [row for row, draw in enumerate(draws) if draw.params.temperature == 0]
    noisy = [row for row, draw in enumerate(draws) if draw.params.temperature != 0]
    for row, token in zip(greedy, _best(adjusted, greedy), strict=True):
        ids[row] = [token] * len(draws[row].choices)
    for low in range(0, len(noisy), _ROWS):
        part = noisy[low : low + _ROWS]
        for row, tokens in zip(part, _draw(_rows(adjusted, part).float(), [draws[row] for row in part]), strict=True):
            ids[row] = tokens
    described = _describe(logits, draws, ids)
    for row, reason in allowed.items():
        if isinstance(reason, BatonError):
            described[row] = [SampledToken(choice, 0, None, (), reason) for choice in draws[row].choices]
    return described


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]


def _adjust(logits: Tensor, draws: Sequence[Draw], allowed: Mapping[int, Tensor | BatonError]) -> Tensor:
    """Penalties, bias and masks (grammars, early stop tokens): in float32 where any is, else the same tensor."""
    result = logits
    for index, draw in enumerate(draws):
        params = draw.params
        early = len(draw.generated) < params.min_tokens and bool(params.stop_token_ids)
        mask = allowed.get(index)
        masked = isinstance(mask, Tensor)
        if not (params.penalised or params.logit_bias or early or masked):
            continue
        if result is logits:
            result = logits.to(torch.float32, copy=True)
        row = result[index]
        if params.penalised:
            _penalise(row, draw)
        if params.logit_bias:
            row[_ids(row, list(params.logit_bias))] += row.new_tensor(list(params.logit_bias.values()))
        if early:
            row[_ids(row, [token for token in params.stop_token_ids if token < len(row)])] = -math.inf
        if isinstance(mask, Tensor):
            _forbid(row, mask)
    return result


def _forbid(row: Tensor, allowed: Tensor) -> None:
    """Masks what a grammar does not allow; ids without a spelling are behind the mask's end."""
    row[len(allowed) :] = -math.inf
    row[: len(allowed)].masked_fill_(~allowed[: len(row)].to(row.device), -math.inf)


def _penalise(row: Tensor, draw: Draw) -> None:
    params = draw.params
    if params.repetition_penalty != 1:
        seen = _ids(row, list({*draw.prompt, *draw.generated}))
        values = row[seen]
        row[seen] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if draw.generated and (params.presence_penalty != 0 or params.frequency_penalty != 0):
        counts = Counter(draw.generated)
        amounts = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        row[_ids(row, list(counts))] -= row.new_tensor(amounts)


def _ids(row: Tensor, ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=row.device)


def _blocked(logits: Tensor) -> Tensor:
    """[R, vocab] as [R, blocks, _BLOCK], the end filled with -inf."""
    short = -logits.shape[1] % _BLOCK
    padded = torch.nn.functional.pad(logits, (0, short), value=-math.inf) if short else logits
    return padded.view(logits.shape[0], -1, _BLOCK)


def _best(logits: Tensor, rows: Sequence[int]) -> list[int]:
    """The id of the highest logit in each of these rows; of equals, the lowest id."""
    best = argmax(logits, rows)
    if -1 in best:
        raise _no_numbers()
    return best


def _no_numbers() -> InternalError:
    return InternalError("the model's logits are not numbers, or every token is masked")


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[list[int]]:
    """Random draws from each row: one for each of its choices."""
    if not draws:
        return []
    blocked = _blocked(logits)
    temperatures = logits.new_tensor([max(draw.params.temperature, _COLDEST) for draw in draws])
    best = blocked.amax(dim=(1, 2))
    if not bool((best > -math.inf).all()):  # false for NaN, too
        raise _no_numbers()
    blocked = (blocked - best[:, None, None]).div_(temperatures[:, None, None])  # the best logit is 0 from here on
    floor = _floor(blocked, [draw.params for draw in draws])
    out = None if floor is None else blocked < floor[:, None, None]
    weights = blocked.exp_()  # in proportion to the probabilities
    if out is not None:
        weights.masked_fill_(out, 0.0)  # afterwards: exp is ten times slower on -inf
    pairs = [(row, key) for row, draw in enumerate(draws) for key in keys_of(draw)]
    rows = torch.tensor([row for row, _ in pairs], dtype=torch.int64, device=logits.device)
    keys = torch.tensor([key for _, key in pairs], dtype=torch.int64, device=logits.device)
    block = _pick(weights.sum(dim=2)[rows], _mix(keys), torch.zeros_like(keys))
    inner = _pick(weights[rows, block], keys, block * _BLOCK)
    tokens: list[list[int]] = [[] for _ in draws]
    for (row, _), token in zip(pairs, (block * _BLOCK + inner).tolist(), strict=True):
        tokens[row].append(token)
    return tokens


def _floor(blocked: Tensor, limits: Sequence[SamplingParams]) -> Tensor | None:
    """Per row the lowest logit that top-k, top-p and min-p leave [R]; None where no row asks for any."""
    cut = [row for row, params in enumerate(limits) if params.top_k > 0 or params.top_p < 1]
    if not cut and all(params.min_p <= 0 for params in limits):
        return None
    floor = blocked.new_tensor([math.log(params.min_p) if params.min_p > 0 else -math.inf for params in limits])
    for width in _WIDTHS:
        if not cut:
            break
        found, known = _nucleus_floor(_rows(blocked, cut), [limits[row] for row in cut], width)
        rows = _ids(floor, cut)[known]
        floor[rows] = torch.maximum(floor[rows], found[known])
        cut = [row for row, done in zip(cut, known.tolist(), strict=True) if not done]
    return floor


def _nucleus_floor(blocked: Tensor, limits: Sequence[SamplingParams], width: int) -> tuple[Tensor, Tensor]:
    """What top-k and then top-p leave of each row, looking at its `width` best tokens.

    Returns the lowest logit that is left [R], and whether `width` was enough to know it [R].
    """
    ordered = _largest(blocked, width)
    width = ordered.shape[1]
    vocab = blocked.shape[1] * blocked.shape[2]
    weights = ordered.exp()
    mass = weights.cumsum(dim=1)
    limit = torch.tensor([params.top_k if 0 < params.top_k < vocab else vocab for params in limits], device=mass.device)
    last = limit.clamp(max=width)[:, None] - 1
    total = mass.gather(1, last)[:, 0]
    inside = limit <= width
    if not bool(inside.all()):
        total = torch.where(inside, total, blocked.exp().sum(dim=(1, 2)))
    top_p = mass.new_tensor([params.top_p for params in limits])
    target = torch.where(top_p < 1, top_p * total, math.inf)
    kept = (mass - weights < target[:, None]).sum(dim=1, keepdim=True)  # those with less than the target above them
    kept = torch.minimum(kept.clamp(min=1), last + 1)
    enough = inside | (mass[:, -1] >= target)
    return ordered.gather(1, kept - 1)[:, 0], enough


def _largest(blocked: Tensor, count: int) -> Tensor:
    """The `count` highest logits of each row, best first [R, count]: all in the `count` pieces with the best maxima."""
    pieces = blocked.view(blocked.shape[0], -1, _PIECE)
    if count < pieces.shape[1]:
        chosen = pieces.amax(dim=2).topk(count, dim=1).indices
        pieces = pieces.gather(1, chosen[:, :, None].expand(-1, -1, _PIECE))
    flat = pieces.flatten(1)
    return flat.topk(min(count, flat.shape[1]), dim=1).values


def _pick(weights: Tensor, keys: Tensor, first: Tensor) -> Tensor:
    """argmax(weights / e) over the last dimension of [P, N], where column c of row i has the noise (keys[i],
    first[i] + c)."""
    counters = first[:, None] + torch.arange(1, weights.shape[1] + 1, device=weights.device)
    bits = _mix(keys[:, None] + counters * _signed(_GOLDEN))
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return (weights.double() / -uniform.log()).argmax(dim=1)


def keys_of(draw: Draw) -> list[int]:
    """One key a choice, from seed, choice and the absolute position of the token to draw."""
    position = len(draw.prompt) + len(draw.generated)
    seed = _mix_int(draw.params.seed + _GOLDEN)
    return [_signed(_mix_int(_mix_int(seed ^ choice) + _GOLDEN * (position + 1))) for choice in draw.choices]


def _mix_int(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014) on an unsigned integer."""
    value &= _MASK64
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK64
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK64
    return value ^ (value >> 31)


def _mix(values: Tensor) -> Tensor:
    """`_mix_int` on an int64 tensor, whose products wrap around."""
    values = (values ^ _shift(values, 30)) * _signed(_MIX_1)
    values = (values ^ _shift(values, 27)) * _signed(_MIX_2)
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """A logical right shift."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _describe(logits: Tensor, draws: Sequence[Draw], ids: list[list[int]]) -> list[list[SampledToken]]:
    """The drawn tokens with the log probabilities that were asked for."""
    result: list[list[SampledToken]] = []
    for row, (draw, tokens) in enumerate(zip(draws, ids, strict=True)):
        wanted = draw.params.logprobs
        if wanted is None or not tokens:
            result.append([SampledToken(c, token, None, ()) for c, token in zip(draw.choices, tokens, strict=True)])
            continue
        scores = logits[row].float()
        total = float(scores.logsumexp(0))
        chosen = scores[_ids(scores, tokens)].tolist()
        top = tuple((token, value - total) for token, value in _top(scores, wanted))
        result.append(
            [
                SampledToken(choice, token, value - total, top)
                for choice, token, value in zip(draw.choices, tokens, chosen, strict=True)
            ]
        )
    return result


def _top(scores: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` best (id, logit) of one row; of equals, the lowest ids first."""
    count = min(count, len(scores))
    if not count:
        return []
    blocked = _blocked(scores[None])
    floor = _largest(blocked, count)[0, -1]
    candidates = (scores >= floor).nonzero().flatten()
    values, order = scores[candidates].sort(descending=True, stable=True)
    ids: list[int] = candidates[order[:count]].tolist()
    best: list[float] = values[:count].tolist()
    return list(zip(ids, best, strict=True))
