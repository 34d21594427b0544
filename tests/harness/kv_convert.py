"""One leg's way from the pools of one worker to those of another, without sockets, and what a naive copy would give.

The plan, the cutting into frames, the codec and the pools are the product's; the oracle names every token by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from baton.engine.paged_kv import PagedKV
from baton.engine.partition import head_ranges
from baton.kernels import reference
from baton.kv_transfer.codec import decode, direct, encode, wire_bytes, wire_cell_bytes, wire_dtype
from baton.kv_transfer.handoff import SendLeg
from baton.kv_transfer.plan import Box, length, shares
from baton.kv_transfer.send_leg import LegPart, SendingLeg
from baton.proto.kv_layout import KVLayout, block_count
from torch import Tensor

CPU = torch.device("cpu")
LAYERS, HEAD_DIM = 3, 8
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
_UNTOUCHED = 7.0


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
        row = HEAD_DIM * value + (0 if self.codec == "raw" else 4)
        held = sum(length(span) for span in head_ranges(self.kv_heads, self.tp[1]))
        return (self.prompt - self.cached) * LAYERS * 2 * held * row


def naive(values: Tensor, codec: str, dtype: str) -> Tensor:
    """KV [..., head_dim] as it must arrive in a pool of `dtype`."""
    target: torch.dtype = getattr(torch, dtype)
    if codec == "raw":
        return values.to(target)
    rows = values.reshape(-1, values.shape[-1])
    return reference.dequantize_kv(*reference.quantize_kv(rows, codec), target).view(values.shape)


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
        self.whole = (3 * torch.randn(shape, generator=generator)).to(getattr(torch, case.dtypes[0]))
        self.sources = [PagedKV(self.layouts[0], rank, counts[0], CPU) for rank in range(case.tp[0])]
        self.targets = [PagedKV(self.layouts[1], rank, counts[1], CPU) for rank in range(case.tp[1])]
        for pool, (low, high) in zip(self.sources, self.layouts[0].head_ranges, strict=True):
            pool.data.copy_(self.whole[:, :, :, low:high])
        for pool in self.targets:
            pool.data.fill_(_UNTOUCHED)
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
        picked = self.whole[:, :, old[0], :, old[1]]  # [tokens, layers, 2, heads, head_dim]
        count = block_count(case.prompt, case.blocks[1]) + 2
        shape = (LAYERS, 2, count, case.kv_heads, case.blocks[1], HEAD_DIM)
        expected = torch.full(shape, _UNTOUCHED, dtype=getattr(torch, case.dtypes[1]))
        if low < high:
            expected[:, :, new[0], :, new[1]] = naive(picked, case.codec, case.dtypes[1])
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
