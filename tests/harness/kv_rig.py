"""Senders and receivers in one process over real sockets, with pools small enough to compare as a whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from baton.engine.paged_kv import KV_DTYPES
from baton.kernels.kv_rows import convert, plain, row_width
from baton.kv_transfer.events import LegKey
from baton.kv_transfer.params import TransferParams
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.ticket import Ticket, TicketBook
from baton.proto.kv_layout import KVLayout, block_count

PARAMS = TransferParams(
    host="127.0.0.1",
    connect_timeout_s=2.0,
    frame_timeout_s=2.0,
    idle_close_s=30.0,
    transport="inline",
    tls=None,
    max_links=64,
    wire="raw",
    checksum=True,
    max_outstanding=2,
    frame_bytes=4096,
)
LEG: LegKey = ("request", 1, 0)
WAIT_S = 30.0


def layout(ranges: Sequence[tuple[int, int]], **changed: Any) -> KVLayout:
    """A small layout whose ranks hold these heads."""
    base = KVLayout(
        fingerprint="model",
        layers=4,
        kv_heads=max(stop for _, stop in ranges),
        head_dim=8,
        rope="default theta=10000.0",
        dtype="float32",
        block_size=4,
        head_ranges=tuple(ranges),
    )
    return replace(base, **changed)


def heads_of(kv_heads: int, ranks: int) -> list[tuple[int, int]]:
    """Head ranges of a worker: even or uneven whole heads, replicated where ranks outnumber them."""
    if ranks <= kv_heads:
        return [(kv_heads * rank // ranks, kv_heads * (rank + 1) // ranks) for rank in range(ranks)]
    return [(rank * kv_heads // ranks, rank * kv_heads // ranks + 1) for rank in range(ranks)]


def _into(out: torch.Tensor | None, kv: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, in the buffer where there is one."""
    return kv.contiguous() if out is None else plain(out.view(kv.dtype)).view(kv.shape).copy_(plain(kv)).view(kv.dtype)


class TensorStore:
    """A pool as one plain tensor [layers, 2, blocks, heads, block_size, row], written token by token."""

    def __init__(self, shape: KVLayout, rank: int, blocks: int) -> None:
        low, high = shape.head_ranges[rank]
        self.block_size = shape.block_size
        self.dtype = KV_DTYPES[shape.dtype]
        self.device = torch.device("cpu")
        width = row_width(shape.head_dim, self.dtype)
        self.data = torch.zeros(shape.layers, 2, blocks, high - low, shape.block_size, width, dtype=self.dtype)
        self.writes = 0

    def _slots(self, blocks: Sequence[int], tokens: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        positions = range(*tokens)
        return (
            torch.tensor([blocks[position // self.block_size] for position in positions], dtype=torch.long),
            torch.tensor([position % self.block_size for position in positions], dtype=torch.long),
        )

    def gather(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        block, offset = self._slots(blocks, tokens)
        picked = plain(self.data)[slice(*layers)][:, :, block, :, offset].view(self.dtype)
        return _into(out, picked[:, :, :, slice(*heads)].permute(1, 2, 3, 0, 4))  # from [tokens, layers, 2, heads, row]

    def scatter(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        payload: torch.Tensor,
    ) -> None:
        self.writes += 1
        payload = self._shaped(payload, layers, heads, tokens)
        for index, (block, offset) in enumerate(zip(*self._slots(blocks, tokens), strict=True)):
            plain(self.data)[slice(*layers), :, block, slice(*heads), offset] = plain(payload)[:, :, :, index]

    def _shaped(
        self, payload: torch.Tensor, layers: tuple[int, int], heads: tuple[int, int], tokens: tuple[int, int]
    ) -> torch.Tensor:
        """What `gather` returned, also into a buffer, as [layers, 2, heads, tokens, row]."""
        spans = [stop - start for start, stop in (layers, heads, tokens)]
        return payload.reshape(-1).view(self.dtype).view(spans[0], 2, spans[1], spans[2], self.data.shape[5])


class FastStore(TensorStore):
    """The same pool for large transfers: whole blocks at once (ranges must end at block edges)."""

    def gather(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        picked = self.data[slice(*layers), :, self._whole(blocks, tokens), slice(*heads)]
        return _into(out, picked.transpose(2, 3).flatten(3, 4))

    def scatter(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        payload: torch.Tensor,
    ) -> None:
        payload = self._shaped(payload, layers, heads, tokens)
        pages = payload.reshape(*payload.shape[:3], -1, self.block_size, payload.shape[4]).transpose(2, 3)
        self.data[slice(*layers), :, self._whole(blocks, tokens), slice(*heads)] = pages

    def _whole(self, blocks: Sequence[int], tokens: tuple[int, int]) -> torch.Tensor:
        if tokens[0] % self.block_size or tokens[1] % self.block_size:
            raise ValueError(f"tokens {tokens} do not end at edges of blocks")
        return torch.tensor(blocks[tokens[0] // self.block_size : tokens[1] // self.block_size])


@dataclass
class Events:
    """What a sender or receiver reported, in order."""

    seen: list[Any] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, event: Any) -> None:
        with self.changed:
            self.seen.append(event)
            self.changed.notify_all()

    def wait(self, kind: type, count: int = 1, wait_s: float = WAIT_S) -> list[Any]:
        """At least `count` events of a kind."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.of(kind)) >= count, wait_s)
            found = self.of(kind)
            assert len(found) >= count, f"wanted {count} {kind.__name__}, got {self.seen}"
            return found

    def of(self, kind: type) -> list[Any]:
        """Those of a kind."""
        return [event for event in self.seen if isinstance(event, kind)]


@dataclass
class Rig:
    """One prefill and one decode worker: all their ranks."""

    prefill: KVLayout
    decode: KVLayout
    sources: list[TensorStore]
    targets: list[TensorStore]
    senders: list[Sender]
    receivers: list[Receiver]
    sent: list[Events]
    received: list[Events]
    book: TicketBook
    incarnation: str = "one"

    def reserve(self, leg: LegKey, prompt: int, cached: int, blocks: Sequence[int], *, expect: bool = True) -> Ticket:
        """A ticket, and the expectation on all decode ranks."""
        ticket = self.book.issue(
            leg,
            worker_id="decode-0",
            incarnation=self.incarnation,
            layout=self.decode,
            addresses=tuple(receiver.address for receiver in self.receivers),
            cached_tokens=cached,
            prompt_tokens=prompt,
            carrier="inline",
            lifetime_s=60.0,
        )
        if expect:
            for receiver in self.receivers:
                receiver.expect(leg, ticket.nonce, blocks, (cached, prompt))
        return ticket

    def open(self, leg: LegKey, ticket: Ticket, prompt: int, blocks: Sequence[int]) -> None:
        """Open on all prefill ranks."""
        for sender in self.senders:
            sender.open(leg, ticket.pack(), blocks, prompt)

    def computed(self, leg: LegKey, tokens: tuple[int, int], layers: tuple[int, int]) -> None:
        """Computed on all prefill ranks."""
        for sender in self.senders:
            sender.computed(leg, tokens, layers)

    def send(self, leg: LegKey, prompt: int, *, chunk: int = 1000, group: int = 100, cached: int = 0) -> None:
        """A whole leg in chunks and groups of layers, with the first blocks of both pools."""
        ticket = self.reserve(leg, prompt, cached, self.target_blocks(prompt))
        self.open(leg, ticket, prompt, self.source_blocks(prompt))
        for start in range(0, prompt, chunk):
            for layer in range(0, self.prefill.layers, group):
                tokens = (start, min(start + chunk, prompt))
                self.computed(leg, tokens, (layer, min(layer + group, self.prefill.layers)))
        self.senders[0].finish(leg, b"first")

    def source_blocks(self, prompt: int) -> list[int]:
        """Blocks for a prompt, in an order that is not the pool's."""
        return list(reversed(range(block_count(prompt, self.prefill.block_size))))

    def target_blocks(self, prompt: int) -> list[int]:
        """Likewise, with one left free."""
        return [block + 1 for block in range(block_count(prompt, self.decode.block_size))][::-1]

    def sequence(self, side: str, head: int, blocks: Sequence[int], tokens: tuple[int, int]) -> list[torch.Tensor]:
        """One head's KV [layers, 2, tokens, dim] as each rank of a side that holds it has it."""
        shape, stores = (self.prefill, self.sources) if side == "prefill" else (self.decode, self.targets)
        return [
            store.gather(blocks, (0, shape.layers), (head - low, head - low + 1), tokens)[:, :, 0]
            for (low, high), store in zip(shape.head_ranges, stores, strict=True)
            if low <= head < high
        ]

    def assert_equal(self, prompt: int, cached: int = 0) -> None:
        """The decode ranks hold what the prefill ranks hold, and nothing else was written."""
        span = (cached, prompt)
        for head in range(self.prefill.kv_heads):
            want = self.sequence("prefill", head, self.source_blocks(prompt), span)[0]
            for got in self.sequence("decode", head, self.target_blocks(prompt), span):
                assert torch.equal(got, want)
        cells = (prompt - cached) * self.prefill.layers * 2 * self.prefill.head_dim
        for (low, high), store in zip(self.decode.head_ranges, self.targets, strict=True):
            assert int((store.data != 0).sum()) == cells * (high - low)

    def settle(self) -> None:
        """Wait until no sender has a link that is busy with frames (a moment is enough in these tests)."""
        time.sleep(0.2)


@contextmanager
def rig(
    prefill: KVLayout,
    decode: KVLayout,
    params: TransferParams = PARAMS,
    *,
    tokens: int = 64,
    decode_params: TransferParams | None = None,
    store: Callable[[KVLayout, int, int], TensorStore] = TensorStore,
) -> Iterator[Rig]:
    """All ranks of both workers; prefill's pools are filled with values that differ in every element."""
    book = TicketBook(b"secret of the decode worker")
    blocks = {side: block_count(tokens, shape.block_size) + 2 for side, shape in (("p", prefill), ("d", decode))}
    sources = [store(prefill, rank, blocks["p"]) for rank in range(prefill.tensor_parallel)]
    targets = [store(decode, rank, blocks["d"]) for rank in range(decode.tensor_parallel)]
    whole = torch.randn(prefill.layers, 2, blocks["p"], prefill.kv_heads, prefill.block_size, prefill.head_dim)
    whole[whole == 0] = 1
    whole = convert(whole, sources[0].dtype)
    for source, (low, high) in zip(sources, prefill.head_ranges, strict=True):
        plain(source.data).copy_(plain(whole)[:, :, :, low:high])
    sent = [Events() for _ in sources]
    received = [Events() for _ in targets]
    receivers = [
        Receiver(decode_params or params, target, decode, rank, "decode-0", "one", book, received[rank])
        for rank, target in enumerate(targets)
    ]
    senders = [Sender(params, source, prefill, rank, sent[rank]) for rank, source in enumerate(sources)]
    try:
        yield Rig(prefill, decode, sources, targets, senders, receivers, sent, received, book)
    finally:
        for sender in senders:
            sender.close()
        for receiver in receivers:
            receiver.close()
