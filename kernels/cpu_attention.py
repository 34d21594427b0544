"""Paged attention on a CPU: gather a sequence's pages, then torch's flash kernel, called so that the bits do not depend
on the batch, the chunk or the block size.

What that takes (all checked in tests/test_kernels_cpu_attention.py):
- keys start at absolute position 0 and are padded with masked ones to a multiple of 512: the flash kernel walks them in
  such steps, a shorter one may be summed in another order, and a masked key adds exactly zero to every sum.
- query rows in multiples of `_ROWS`: one to three rows at the end of a call take another path of the matrix product.
- one head per batch entry: with four or more heads the kernel may choose, by the amount of work, a packed path with
  other bits.
Query heads that share a KV head are rows of one product in decode, and share the gathered pages in prefill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .kv_rows import KINDS, convert, plain
from .native import library
from .paged_attention import PagedAttention

_KEY_STEP = 512  # keys are padded to a multiple of this
_ROWS = {torch.float32: 16}
_ROWS_REDUCED = 4
_GROUP_BYTES = 4 << 20  # of gathered keys for one call in decode: small enough for the cache
_MAX_WASTE = 1.25  # padded keys over real ones, when sequences of different lengths share a call
_QUERY_SLAB = 256  # queries of one call in prefill; later keys are not read for them


@dataclass(frozen=True, slots=True)
class _Pages:
    """How to gather the keys of some sequences: rows of the pool seen as [blocks * heads, block_size * row]."""

    rows: Tensor  # int64 [sequences * heads * blocks]
    stale: Tensor  # int64: rows of the gathered [.., D] behind each sequence's end, to be zeroed
    heads: int  # sequences * heads
    span: int  # gathered keys of each head
    keys: int  # multiple of _KEY_STEP <= span


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one new token each, in one call."""

    tokens: Tensor  # int64 [g]: rows of the step
    pages: _Pages
    mask: Tensor  # float32 [g * heads, 1, 1, keys]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several new tokens."""

    start: int  # rows of the step
    stop: int
    context: int  # tokens of the sequence, the new ones included
    pages: _Pages


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """Everything about a step's attention that is the same in each layer, for the torch path."""

    decode: tuple[_Decode, ...]
    prefill: tuple[_Prefill, ...]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
        """Causal attention of query [T, Hq, D] over keys and values [blocks, H, block_size, row] into out [T, Hq, D].

        Where the pool's dtype is not the query's, both are widened to the one that holds either (float32), so nothing
        but the pool's own rounding is lost.
        """
        wide = torch.float32 if keys.dtype in KINDS else torch.promote_types(query.dtype, keys.dtype)
        query = query.to(wide)
        for group in self.decode:
            out[group.tokens] = _decode(query, keys, values, group, scale).to(out.dtype)
        for piece in self.prefill:
            _prefill(query, keys, values, piece, scale, out)


AttentionPlan = PagedAttention | GatheredAttention


def plan_attention(
    cu_seqlens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    pool: Tensor,
) -> AttentionPlan:
    """Plan a step over pools shaped like `pool` [blocks, H, block_size, row]: by C, or without the library by torch.

    The tokens of sequence i are rows cu_seqlens[i]:cu_seqlens[i + 1], the last ones of its context_lens[i] tokens.
    """
    if library() is not None:
        return PagedAttention(cu_seqlens, context_lens, block_tables, pool)
    return plan_gathered(cu_seqlens, context_lens, block_tables, pool)


def plan_gathered(
    cu_seqlens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    pool: Tensor,
) -> GatheredAttention:
    """The torch path of `plan_attention`."""
    counts = [stop - start for start, stop in pairwise(cu_seqlens)]
    single = sorted((i for i, count in enumerate(counts) if count == 1), key=lambda i: context_lens[i])
    decode = []
    for members in _group(single, context_lens, pool):
        tables = [block_tables[i] for i in members]
        lengths = [context_lens[i] for i in members]
        pages = _plan_pages(tables, lengths, pool)
        mask = torch.zeros(len(members), 1, pages.keys)
        for row, length in enumerate(lengths):
            mask[row, :, length:] = -math.inf
        mask = mask.expand(-1, pool.shape[1], -1).reshape(-1, 1, 1, pages.keys)
        decode.append(_Decode(torch.tensor([cu_seqlens[i] for i in members]), pages, mask))
    prefill = [
        _Prefill(
            cu_seqlens[i], cu_seqlens[i + 1], context_lens[i], _plan_pages([block_tables[i]], [context_lens[i]], pool)
        )
        for i, count in enumerate(counts)
        if count > 1
    ]
    return GatheredAttention(tuple(decode), tuple(prefill))


def _group(ascending: Sequence[int], lengths: Sequence[int], pool: Tensor) -> list[list[int]]:
    """Cut sequences, shortest first, into calls that waste little padding and fit the cache."""
    row_bytes = pool.shape[1] * pool.shape[3] * pool.element_size()
    groups: list[list[int]] = []
    real = 0
    for i in ascending:
        keys = _padded(lengths[i])
        members = len(groups[-1]) + 1 if groups else 0
        real += keys
        if not groups or members * keys > _MAX_WASTE * real or members * keys * row_bytes > _GROUP_BYTES:
            groups.append([])
            real = keys
        groups[-1].append(i)
    return groups


def _padded(tokens: int) -> int:
    return -(-tokens // _KEY_STEP) * _KEY_STEP


def _plan_pages(tables: Sequence[Sequence[int]], lengths: Sequence[int], pool: Tensor) -> _Pages:
    _, heads, size, _ = pool.shape
    keys = _padded(max(lengths))
    blocks = -(-keys // size)
    span = blocks * size
    table = torch.empty(len(tables), blocks, dtype=torch.int64)
    for row, (ids, length) in enumerate(zip(tables, lengths, strict=True)):
        used = -(-length // size)
        table[row, :used] = torch.tensor(ids[:used], dtype=torch.int64)
        table[row, used:] = ids[0]
    rows = (table[:, None, :] * heads + torch.arange(heads)[None, :, None]).reshape(-1)
    behind = torch.arange(span)[None, :] >= torch.tensor(lengths)[:, None]
    stale = behind[:, None, :].expand(-1, heads, -1).reshape(-1).nonzero().squeeze(1)
    return _Pages(rows, stale, len(tables) * heads, span, keys)


def _gather(pool: Tensor, pages: _Pages, dtype: torch.dtype) -> Tensor:
    """[heads, 1, keys, D] of `dtype`, zero behind each sequence's end: what is left there must not reach a product."""
    width = pool.shape[3]
    picked = torch.embedding(plain(pool).view(-1, pool.shape[2] * width), pages.rows)
    picked.view(-1, width).index_fill_(0, pages.stale, 0)
    return convert(picked.view(pool.dtype).view(pages.heads, 1, pages.span, width)[:, :, : pages.keys], dtype)


def _flash(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[heads, 1, rows, D]."""
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )[0]
    return result


def _whole_rows(count: int, dtype: torch.dtype) -> int:
    step = _ROWS.get(dtype, _ROWS_REDUCED)
    return -(-count // step) * step


def _decode(query: Tensor, keys: Tensor, values: Tensor, group: _Decode, scale: float) -> Tensor:
    """[g, Hq, D]."""
    picked = query[group.tokens]
    count, query_heads, dim = picked.shape
    share = query_heads // keys.shape[1]
    rows = picked.view(group.pages.heads, 1, share, dim)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, _whole_rows(share, query.dtype) - share))
    k, v = (_gather(pool, group.pages, query.dtype) for pool in (keys, values))
    result = _flash(rows, k, v, group.mask, scale)
    return result[:, :, :share].reshape(count, query_heads, dim)


def _prefill(query: Tensor, keys: Tensor, values: Tensor, piece: _Prefill, scale: float, out: Tensor) -> None:
    k, v = (_gather(pool, piece.pages, query.dtype) for pool in (keys, values))
    first = piece.context - (piece.stop - piece.start)  # absolute position of the first new token
    for start in range(piece.start, piece.stop, _QUERY_SLAB):
        stop = min(start + _QUERY_SLAB, piece.stop)
        seen = first + stop - piece.start
        used = min(_padded(seen), piece.pages.keys)
        _slab(query[start:stop], k[:, :, :used], v[:, :, :used], seen, scale, out[start:stop])


def _slab(query: Tensor, keys: Tensor, values: Tensor, seen: int, scale: float, out: Tensor) -> None:
    """Queries [n, Hq, D] whose last one sees the first `seen` keys.

    They run in reverse order: then the mask of row i and key j depends on i + j alone, so one vector is the whole mask.
    """
    count, query_heads, dim = query.shape
    heads, _, used, _ = keys.shape
    rows = _whole_rows(count, query.dtype)
    reversed_query = torch.nn.functional.pad(query.flip(0), (0, 0, 0, 0, 0, rows - count))
    by_share = reversed_query.view(rows, heads, query_heads // heads, dim).permute(2, 1, 0, 3)
    diagonal = torch.zeros(used + rows)
    diagonal[seen:] = -math.inf
    mask = diagonal.as_strided((1, 1, rows, used), (0, 0, 1, 1))
    target = out.view(count, heads, query_heads // heads, dim)
    for share, share_query in enumerate(by_share):
        result = _flash(share_query.unsqueeze(1), keys, values, mask, scale)
        target[:, :, share] = result[:, 0, :count].transpose(0, 1).flip(0)
