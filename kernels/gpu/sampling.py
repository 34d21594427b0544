"""Drawing tokens as engine/sampler.py does, without sorting the vocabulary: the same steps and the same noise.

A row is looked at in blocks of 256 tokens, whose maxima say which parts of it can matter. Logits are taken as distances
from the best one, divided by the temperature; a float32 that is not negative has the order of its bits, so the largest
distance that top-k and top-p leave is searched for four bits at a time, by counting or weighing what lies in each of 16
ranges. The draw, argmax(weight / e) with e exponential, is made among blocks and then in one of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import draw, mix

_BLOCK = 256  # token ids drawn together, as in engine/sampler.py: part of what a seed means
_CHUNK = 1024  # token ids that a search looks at together
_COLDEST = 1e-30  # a smaller temperature would be zero in float32


@triton.jit
def _statistics(logits, maxima, masses, vocab, stride, BLOCK: tl.constexpr):
    """Of each block: the highest logit, and the sum of exp(logit - highest)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf"))
    highest = tl.max(logit, 0)
    place = row * tl.num_programs(1) + block
    tl.store(maxima + place, highest)
    tl.store(masses + place, tl.sum(tl.exp(logit - tl.where(highest > -float("inf"), highest, 0.0)), 0))


@triton.jit
def _distance(logit, best, temperature):
    """float32, not negative."""
    return tl.abs(tl.div_rn(best - logit, temperature + tl.zeros_like(logit)))


@triton.jit
def _chunk(logits, start, best, temperature, vocab, CHUNK: tl.constexpr):
    """Distances, as their bits, and weights of some tokens."""
    token = start + tl.arange(0, CHUNK)
    logit = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
    distance = _distance(logit, best, temperature)
    return distance.to(tl.int32, bitcast=True), tl.exp(-distance)


@triton.jit
def _mass(logits, best, temperature, vocab, limit, CHUNK: tl.constexpr):
    """The weights of all tokens whose distance has bits below `limit`."""
    sums = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, vocab, CHUNK):
        bits, weight = _chunk(logits, start, best, temperature, vocab, CHUNK)
        sums += tl.where(bits < limit, weight, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _search(
    logits,
    maxima,
    best,
    temperature,
    vocab,
    blocks,
    target,
    limit,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The bits of the least distance within which there are `target` tokens, or that weight, and what lies below it.
    Only tokens up to `limit` count."""
    ranges = tl.arange(0, 16)
    per_chunk: tl.constexpr = CHUNK // BLOCK
    found = limit * 0
    below = target * 0.0
    for step in range(8):
        shift = 28 - 4 * step
        inside = tl.zeros((16,), tl.float32)
        for start in range(0, vocab, CHUNK):
            block = start // BLOCK + tl.arange(0, per_chunk)
            highest = tl.max(tl.load(maxima + block, mask=block < blocks, other=-float("inf")), 0)
            nearest = _distance(highest, best, temperature).to(tl.int32, bitcast=True)
            if (nearest >> shift) <= found * 16 + 15:  # else the whole chunk lies behind what is looked at
                bits, weight = _chunk(logits, start, best, temperature, vocab, CHUNK)
                if not WEIGHED:
                    weight = tl.full((CHUNK,), 1.0, tl.float32)
                prefix = bits >> shift
                counted = (prefix >> 4 == found) & (bits <= limit)
                hit = (ranges[:, None] == (prefix & 15)[None, :]) & counted[None, :]
                inside += tl.sum(tl.where(hit, weight[None, :], 0.0), 1)
        up_to = tl.cumsum(inside, 0) + below
        digit = tl.minimum(tl.sum((up_to < target).to(tl.int32), 0), 15)
        below += tl.sum(tl.where(ranges < digit, inside, 0.0), 0)
        found = found * 16 + digit
    return found, below


@triton.jit
def _limits(
    logits,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    bests,
    farthest,
    vocab,
    stride,
    blocks,
    COLDEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Of each row: the best logit, and the largest distance from it that top-k, top-p and min-p leave."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    row_maxima = maxima + row * blocks
    best = tl.max(tl.load(row_maxima + block, mask=block < blocks, other=-float("inf")), 0)
    logits += row * stride
    temperature = tl.maximum(tl.load(temperatures + row), COLDEST)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    limit = top_k * 0 + 0x7F800000  # infinity
    if top_k > 0:
        if top_k < vocab:
            count = top_k.to(tl.float32)
            limit, above = _search(
                logits, row_maxima, best, temperature, vocab, blocks, count, limit, False, BLOCK, CHUNK
            )
        else:
            above = top_k.to(tl.float32)
    else:
        above = top_k.to(tl.float32)
    last = limit
    if top_p < 1:
        total = _mass(logits, best, temperature, vocab, limit, CHUNK)
        if limit < 0x7F800000:  # of equals at the end, as many as top-k has room for
            total += (top_k.to(tl.float32) - above) * tl.exp(-limit.to(tl.float32, bitcast=True))
        last, above = _search(
            logits, row_maxima, best, temperature, vocab, blocks, top_p * total, limit, True, BLOCK, CHUNK
        )
    distance = tl.minimum(last, limit).to(tl.float32, bitcast=True)
    if min_p > 0:
        distance = tl.minimum(distance, -tl.log(min_p))
    tl.store(bests + row, best)
    tl.store(farthest + row, distance)


@triton.jit
def _weights(logits, temperatures, bests, farthest, row, token, vocab, stride, COLDEST: tl.constexpr):
    """In proportion to the probabilities; zero for what is not left."""
    logit = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf"))
    temperature = tl.maximum(tl.load(temperatures + row), COLDEST)
    distance = _distance(logit, tl.load(bests + row), temperature)
    return tl.where(distance <= tl.load(farthest + row), tl.exp(-distance), 0.0)


@triton.jit
def _block_weights(
    logits, temperatures, bests, farthest, sums, vocab, stride, COLDEST: tl.constexpr, BLOCK: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    weight = _weights(logits, temperatures, bests, farthest, row, token, vocab, stride, COLDEST)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(weight, 0))


@triton.jit
def _pick(
    logits,
    temperatures,
    bests,
    farthest,
    maxima,
    masses,
    sums,
    rows,
    keys,
    tokens,
    vocab,
    stride,
    blocks,
    COLDEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0)
    row = tl.load(rows + pair)
    block, inner = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    there = block < blocks
    highest = tl.load(maxima + row * blocks + block, mask=there, other=-float("inf"))
    whole = tl.sum(tl.load(masses + row * blocks + block, mask=there, other=0.0), 0)
    if tl.load(temperatures + row) == 0:
        chosen = tl.argmax(highest, 0)
        token = chosen * BLOCK + inner
        logit = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf"))
        result = chosen * BLOCK + tl.argmax(logit, 0)
    else:
        key = tl.load(keys + pair + inner * 0).to(tl.uint64, bitcast=True)
        weight = tl.load(sums + row * blocks + block, mask=there, other=0.0)
        one_key = tl.max(mix(key).to(tl.int64, bitcast=True), 0) + block.to(tl.int64) * 0
        chosen = draw(weight, one_key.to(tl.uint64, bitcast=True), block)
        token = chosen * BLOCK + inner
        weight = _weights(logits, temperatures, bests, farthest, row, token, vocab, stride, COLDEST)
        result = chosen * BLOCK + draw(weight, key, token)
    is_number = (whole == whole) & (tl.max(highest, 0) > -float("inf"))
    tl.store(tokens + pair, tl.where(is_number, result, -1).to(tl.int64))


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    rows: Tensor,
    keys: Tensor,
) -> Tensor:
    """One token for each pair of a row and a key of noise: int64 [P]; -1 where a row is not numbers, or all masked.

    logits float32 [R, vocab] of contiguous rows, after penalties and masks; temperatures, top_p and min_p float32 [R],
    top_k int32 [R] (0, 1 and 0 leave all; temperature 0 takes the best token, of equals the lowest id); rows and keys
    int64 [P]. Greedy tokens equal those of engine/sampler.py; drawn ones do unless sums of weights in another order
    decide. Raises ValueError.
    """
    count, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits of {logits.dtype} and strides {logits.stride()}: must be float32, rows contiguous")
    numbers = (("temperatures", temperatures), ("top_p", top_p), ("min_p", min_p))
    for name, tensor, dtype in (*((n, t, torch.float32) for n, t in numbers), ("top_k", top_k, torch.int32)):
        if tuple(tensor.shape) != (count,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} of {tensor.dtype}: must be {dtype} [{count}]")
    if rows.shape != keys.shape or rows.dtype != torch.int64 or keys.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)} of {rows.dtype}, keys {list(keys.shape)} of {keys.dtype}")
    blocks = triton.cdiv(vocab, _BLOCK)
    padded = triton.next_power_of_2(blocks)
    tokens = torch.empty_like(rows)
    if not (count and len(rows)):
        return tokens
    maxima, masses, sums = torch.empty((3, count, blocks), dtype=torch.float32, device=logits.device).unbind()
    bests, farthest = torch.empty((2, count), dtype=torch.float32, device=logits.device).unbind()
    stride, drawn = logits.stride(0), {"COLDEST": _COLDEST, "BLOCK": _BLOCK}
    _statistics[(count, blocks)](logits, maxima, masses, vocab, stride, BLOCK=_BLOCK, num_warps=2)
    limits = (temperatures, top_k, top_p, min_p, bests, farthest)
    _limits[(count,)](logits, maxima, *limits, vocab, stride, blocks, BLOCKS=padded, CHUNK=_CHUNK, **drawn, num_warps=8)
    where = (logits, temperatures, bests, farthest)
    _block_weights[(count, blocks)](*where, sums, vocab, stride, **drawn, num_warps=2)
    pairs = (maxima, masses, sums, rows, keys, tokens)
    _pick[(len(rows),)](*where, *pairs, vocab, stride, blocks, BLOCKS=padded, **drawn, num_warps=4)
    return tokens
