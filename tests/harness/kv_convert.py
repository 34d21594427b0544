"""One leg's way from the pools of one worker to those of another, without sockets, and what a naive copy would give.

The plan, the cutting into frames, the codec and the pools are the product's; the oracle names every token by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from baton.engine.paged_kv import KV_DTYPES, PagedKV
from baton.engine.partition import head_ranges
from baton.kernels import reference
from baton.kernels.kv_rows import KINDS, plain, row_width
from baton.kv_transfer.codec import decode, direct, encode, wire_bytes, wire_cell_bytes, wire_dtype
from baton.kv_transfer.handoff import SendLeg
from baton.kv_transfer.plan import Box, length, shares
from baton.kv_transfer.send_leg import LegPart, SendingLeg
from baton.proto.kv_layout import KVLayout, block_count
from torch import Tensor

CPU = torch.device("cpu")
LAYERS, HEAD_DIM = 3, 8
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
_UNTOUCHED = 0x11  # in every byte


@dataclass(frozen=True)
class Case:
    """Prefill's value first in each pair."""

    tp: tuple[int, int] = (1, 1)
    kv_heads: int = 3
    blocks: tuple[int, int] = (4, 16)  # tokens
    dtypes: tuple[str, str] = ("float32", "float32")
    codec: str = "raw"
    prompt: int = 37
    cached: int = 0
    chunk: int = 16
    group: int = 2  # layers
    frame_bytes: int = 2000

    def layout(self, side: int) -> KVLayout:
        """Of the prefill (0) or decode (1) worker."""
        ranges = head_ranges(self.kv_heads, self.tp[side])
        return KVLayout("m", LAYERS, self.kv_heads, HEAD_DIM, "rope", self.dtypes[side], self.blocks[side], ranges)

    @cached_property
    def wire_dtype(self) -> str:
        """Of the payloads."""
        return wire_dtype(*self.dtypes, self.codec)

    @property
    def bytes(self) -> int:
        """What must travel: each token's key and value once for each head of each decode rank."""
        value = min(_WIDTH[dtype] for dtype in self.dtypes) if self.codec == "raw" else 1
        row = HEAD_DIM * value + (4 if value == 1 else 0)
        held = sum(length(span) for span in head_ranges(self.kv_heads, self.tp[1]))
        return (self.prompt - self.cached) * LAYERS * 2 * held * row


def naive(values: Tensor, codec: str, dtype: str) -> Tensor:
    """KV [..., row] as it must arrive in a pool of `dtype`: by the plain reference, also where there are codes."""
    target = KV_DTYPES[dtype]
    if codec == "raw":
        if values.dtype == target:
            return values
        if values.dtype in KINDS:
            values = _floats(values, torch.float32 if target in KINDS else target)
        return _codes(values, KINDS[target]) if target in KINDS else values.to(target)
    rows = values.reshape(-1, values.shape[-1])
    return reference.dequantize_kv(*reference.quantize_kv(rows, codec), target).view(values.shape)


def _codes(values: Tensor, kind: str) -> Tensor:
    codes, scales = reference.quantize_kv(values.reshape(-1, values.shape[-1]), kind)
    rows = torch.cat((codes.view(torch.uint8), scales[:, None].view(torch.uint8)), 1)
    return rows.view(*values.shape[:-1], -1).view(KV_DTYPES[kind])


def _floats(rows: Tensor, dtype: torch.dtype) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1]).view(torch.uint8)
    codes = flat[:, :-4].view(torch.int8) if rows.dtype == torch.int8 else flat[:, :-4]
    values = reference.dequantize_kv(codes, flat[:, -4:].clone().view(torch.float32)[:, 0], dtype)
    return values.view(*rows.shape[:-1], -1)


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Equal in every bit, dtype and shape."""
    return (
        one.dtype == two.dtype
        and one.shape == two.shape
        and torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
    )


class Conversion:
    """Both workers' pools; prefill's are filled at random."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.layouts = (case.layout(0), case.layout(1))
        counts = [block_count(case.prompt, size) + 2 for size in case.blocks]
        generator = torch.Generator().manual_seed(sum(map(ord, repr(case))))
        self.tables = [torch.randperm(count, generator=generator).tolist()[:-2] for count in counts]
        shape = (LAYERS, 2, counts[0], case.kv_heads, case.blocks[0], HEAD_DIM)
        self.whole = naive(3 * torch.randn(shape, generator=generator), "raw", case.dtypes[0])
        self.sources = [PagedKV(self.layouts[0], rank, counts[0], CPU) for rank in range(case.tp[0])]
        self.targets = [PagedKV(self.layouts[1], rank, counts[1], CPU) for rank in range(case.tp[1])]
        for pool, (low, high) in zip(self.sources, self.layouts[0].head_ranges, strict=True):
            plain(pool.data).copy_(plain(self.whole)[:, :, :, low:high])
        for pool in self.targets:
            pool.data.view(torch.uint8).fill_(_UNTOUCHED)
        self.bytes = 0

    def run(self) -> None:
        """Every prefill rank computes its chunks and sends what each decode rank lacks."""
        case = self.case
        plan = shares(self.layouts[0].head_ranges, self.layouts[1].head_ranges, case.kv_heads)
        for (source, target), heads in plan.items():
            leg = SendingLeg(("r", 1, 0), tuple(self.tables[0]), (case.cached, case.prompt), SendLeg([target]))
            part = LegPart(leg, target, heads, due=0, wants_first_tokens=False)
            for start in range(0, case.prompt, case.chunk):
                tokens = (start, min(start + case.chunk, case.prompt))
                for layer in range(0, LAYERS, case.group):
                    part.queue(tokens, (layer, min(layer + case.group, LAYERS)))
            cell = wire_cell_bytes(HEAD_DIM, case.wire_dtype, case.codec)
            while part.ready:
                self._frame(source, target, part.take(cell, case.frame_bytes))

    def _frame(self, source: int, target: int, box: Box) -> None:
        case = self.case
        here, there = (
            (box.heads[0] - layout.head_ranges[rank][0], box.heads[1] - layout.head_ranges[rank][0])
            for layout, rank in zip(self.layouts, (source, target), strict=True)
        )
        gathered = self.sources[source].gather(self.tables[0], box.layers, here, box.tokens)
        payload = torch.empty(wire_bytes(box, HEAD_DIM, case.wire_dtype, case.codec), dtype=torch.uint8)
        encode(gathered, payload, case.wire_dtype, case.codec)
        if direct(self.sources[source].dtype, case.wire_dtype, case.codec):
            assert same_bits(payload, gathered.reshape(-1).view(torch.uint8))
        self.bytes += payload.numel()
        values = decode(payload, box, HEAD_DIM, case.wire_dtype, case.codec, self.targets[target].dtype)
        self.targets[target].scatter(self.tables[1], box.layers, there, box.tokens, values)

    def check(self) -> None:
        """The decode pools hold what a naive copy writes, bit for bit, and nothing else was touched."""
        case, (low, high) = self.case, (self.case.cached, self.case.prompt)
        old, new = (_places(table, size, low, high) for table, size in zip(self.tables, case.blocks, strict=True))
        picked = plain(self.whole)[:, :, old[0], :, old[1]].view(self.whole.dtype)  # [tokens, layers, 2, heads, row]
        count, target = block_count(case.prompt, case.blocks[1]) + 2, KV_DTYPES[case.dtypes[1]]
        shape = (LAYERS, 2, count, case.kv_heads, case.blocks[1], row_width(HEAD_DIM, target))
        expected = torch.empty(shape, dtype=target)
        expected.view(torch.uint8).fill_(_UNTOUCHED)
        if low < high:
            plain(expected)[:, :, new[0], :, new[1]] = plain(naive(picked, case.codec, case.dtypes[1]))
        for pool, (start, stop) in zip(self.targets, self.layouts[1].head_ranges, strict=True):
            assert same_bits(pool.data, expected[:, :, :, start:stop]), case
        assert self.bytes == case.bytes, case


def _places(table: list[int], size: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Block and offset of each token in [low, high)."""
    tokens = torch.arange(low, high)
    return torch.tensor(table)[tokens // size], tokens % size


def convert(case: Case) -> None:
    """Run and check one case."""
    conversion = Conversion(case)
    conversion.run()
    conversion.check()
