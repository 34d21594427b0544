"""What it takes to move KV from one process to another: every carrier against memcpy and plain gloo, in one run.

    .venv/bin/python benchmarks/kv_transfer.py [--quick] [--repeats N] [--json] [--peer mooncake|nixl ...]

Two processes, a core each: real pools, a real `Sender` in one, a real `Receiver` in the other. A transfer is timed at
the sender, from the moment all KV counts as computed to the event that says that the receiver has placed all of it. In
each round every row is measured once, so that rows are comparable on a machine whose speed changes; medians of rounds.
Every row moves from one part of a large pool to the next, as prompts do, so that no cache holds what is moved.

- memcpy     one thread copies as many bytes between two pools (at most 512 MiB of them)
- raw gloo   `ProcessGroupGloo` send and receive of as many bytes, in messages of 4 MiB as in our frames; /L: of 64 MiB
- the rest   our carriers, with checksums (+sum) and without

`--peer` with `--peer-python PATH` measures another project's engine, in a Python of its own, beside ours: see
benchmarks/kv_peers.py.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import xxhash
from baton.cluster.config import Config
from baton.cluster.spec import SpecBuilder
from baton.engine.model_config import load_config
from baton.engine.paged_kv import PagedKV
from baton.kernels.memory import prefer_huge_pages
from baton.kv_transfer.carriers import bytes_of
from baton.kv_transfer.events import LegKey
from baton.kv_transfer.params import TransferParams
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.ticket import TicketBook
from baton.kv_transfer.wire import Wire
from baton.proto.kv_layout import KVLayout, block_count
from baton.text.source import resolve
from torch._C._distributed_c10d import FileStore

BLOCK = 16
TOKENS = (256, 1024, 4096, 16384)
CARRIERS = ("gloo", "inline", "shm")
COPY_BYTES = 512 << 20
POOL_BYTES = 256 << 20  # of a pool, at least
MESSAGES = {"raw gloo": 4 << 20, "raw gloo/L": 64 << 20}  # bytes of one; the first as in our frames
_WAIT_S = 60.0
_SECRET = b"secret of the benchmark"
_PARAMS = TransferParams(
    host="127.0.0.1",
    connect_timeout_s=5.0,
    frame_timeout_s=20.0,
    idle_close_s=300.0,
    transport="inline",
    tls=None,
    max_links=64,
    wire="raw",
    checksum=True,
    max_outstanding=2,
    frame_bytes=4 << 20,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    def layout(self, block_size: int) -> KVLayout:
        """One rank, bfloat16."""
        heads = ((0, self.kv_heads),)
        return KVLayout(self.name, self.layers, self.kv_heads, self.head_dim, "any", "bfloat16", block_size, heads)

    def bytes(self, tokens: int) -> int:
        """KV of so many tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2 * tokens


SHAPES = (Shape("SmolLM2-135M", 30, 3, 64), Shape("Llama-3-8B", 32, 8, 128))


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one way of moving one amount of KV."""

    shape: str
    tokens: int
    bytes: int
    way: str
    seconds: float
    gb_s: float
    of_memcpy: float
    of_gloo: float
    messages: int  # on the link, both directions, a parcel's payload being one; 0 where that means nothing
    frames: int
    sender_cpu_s: float  # both processes' processor time, which a busy machine changes less than the rest
    receiver_cpu_s: float


class Counter:
    """Counts the messages on links of this process; what a carrier cuts a parcel into is counted as frames."""

    def __init__(self) -> None:
        self.count = self.inline = 0  # of them, payloads on the link's own socket that are no canary
        for name in ("send", "begin_payload", "receive"):
            setattr(Wire, name, self._counted(name, getattr(Wire, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **fields: Any) -> Any:
            self.count += 1
            self.inline += name == "begin_payload"
            return original(*arguments, **fields)

        return call


class Rank:
    """What both children are: a pool on one core, and orders over a pipe."""

    def __init__(self, core: int, layout: KVLayout, tokens: int) -> None:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        self.layout = layout
        self.total = block_count(tokens, layout.block_size)
        self.pool = PagedKV(layout, 0, self.total, torch.device("cpu"))
        self.flat = self.pool.data.view(-1).view(torch.uint8)
        self.ends: dict[tuple[str, bool], Any] = {}
        self.turn = 0
        self.last: list[int] = []  # blocks of the last transfer

    def blocks(self, tokens: int) -> list[int]:
        """The next blocks for so many tokens."""
        need = block_count(tokens, self.layout.block_size)
        start = self.turn * need % (self.total // need * need)
        self.turn += 1
        return list(range(start, start + need))

    def part(self, whole: torch.Tensor, size: int) -> torch.Tensor:
        """The next `size` bytes of `whole`, or all of it."""
        size = min(size, whole.numel())
        start = self.turn * size % (whole.numel() // size * size)
        self.turn += 1
        return whole[start : start + size]

    def cpu(self) -> float:
        """Seconds of processor time of this process."""
        return time.process_time()

    def checksum(self, tokens: int) -> int:
        """Of the KV that was moved last."""
        digest = xxhash.xxh3_64()
        for layer in range(self.layout.layers):
            kv = self.pool.gather(self.last, (layer, layer + 1), (0, self.layout.kv_heads), (0, tokens))
            digest.update(bytes_of(kv))
        return digest.intdigest()

    def join_gloo(self, path: str, rank: int) -> None:
        """A plain group of two, connected."""
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = datetime.timedelta(seconds=_WAIT_S)
        self.group = kind(FileStore(path, 2), rank, 2, options)

    def gloo(self, size: int, message: int, rank: int) -> float:
        """Move bytes from rank 0 to rank 1; the seconds until rank 1 has said that it has them."""
        sign = torch.zeros(8, dtype=torch.uint8)
        flat = self.part(self.flat, size)
        began = time.perf_counter()
        move = self.group.recv if rank else self.group.send
        for start in range(0, size, message):
            move([flat[start : min(start + message, size)]], 1 - rank, 0).wait()
        (self.group.send if rank else self.group.recv)([sign], 1 - rank, 0).wait()
        return time.perf_counter() - began


class Decode(Rank):
    """The receiving process."""

    def __init__(self, core: int, layout: KVLayout, tokens: int) -> None:
        super().__init__(core, layout, tokens)
        self.book = TicketBook(_SECRET)

    def open(self, params: TransferParams) -> str:
        """Listen; the address."""
        receiver = Receiver(params, self.pool, self.layout, 0, "decode-0", "one", self.book, lambda event: None)
        self.ends[params.transport, params.checksum] = receiver
        return receiver.address

    def reserve(self, key: tuple[str, bool], leg: LegKey, tokens: int) -> bytes:
        """A ticket."""
        receiver = self.ends[key]
        ticket = self.book.issue(
            leg,
            worker_id="decode-0",
            incarnation="one",
            layout=self.layout,
            addresses=(receiver.address,),
            cached_tokens=0,
            prompt_tokens=tokens,
            carrier=key[0],
            lifetime_s=600.0,
        )
        self.last = self.blocks(tokens)
        receiver.expect(leg, ticket.nonce, self.last, (0, tokens))
        return ticket.pack()

    def forget(self, key: tuple[str, bool], leg: LegKey) -> None:
        """The leg is over."""
        self.ends[key].forget(leg)

    def clear(self) -> None:
        """Empty the pool, so that what is compared next was moved after this."""
        self.flat.zero_()


class Prefill(Rank):
    """The sending process."""

    def __init__(self, core: int, layout: KVLayout, tokens: int) -> None:
        super().__init__(core, layout, tokens)
        noise = torch.randint(0, 255, (min(1 << 20, self.flat.numel()),), dtype=torch.uint8)
        for start in range(0, self.flat.numel(), noise.numel()):
            part = self.flat[start : start + noise.numel()]
            part.copy_(noise[: part.numel()])
            part[:8] = torch.tensor(list(start.to_bytes(8, "little")), dtype=torch.uint8)[: part.numel()]
        self.counter = Counter()
        self.copy = prefer_huge_pages(torch.empty(min(COPY_BYTES, self.flat.numel()), dtype=torch.uint8)).fill_(1)

    def open(self, params: TransferParams) -> None:
        """A sender of its own."""
        self.done = threading.Event()
        self.ends[params.transport, params.checksum] = Sender(params, self.pool, self.layout, 0, self._on_event)

    def _on_event(self, event: Any) -> None:
        self.event, self.ended = event, time.perf_counter()
        self.done.set()

    def send(self, key: tuple[str, bool], leg: LegKey, ticket: bytes, tokens: int) -> tuple[float, int, int]:
        """Seconds, frames and messages of one transfer. Raises RuntimeError when it fails."""
        sender, before, inline = self.ends[key], self.counter.count, self.counter.inline
        self.done.clear()
        self.last = self.blocks(tokens)
        sender.open(leg, ticket, self.last, tokens)
        time.sleep(0.005)  # the link takes the leg in
        began = time.perf_counter()
        sender.computed(leg, (0, tokens), (0, self.layout.layers))
        sender.finish(leg, b"first")
        if not self.done.wait(_WAIT_S) or type(self.event).__name__ != "Sent":
            raise RuntimeError(f"{key}: {getattr(self.event, 'error', 'no end')}")
        if (key[0] == "inline") != (self.counter.inline > inline):
            raise RuntimeError(f"{key[0]} was wanted, and another carrier served")
        return self.ended - began, self.event.frames, self.counter.count - before

    def memcpy(self, size: int) -> float:
        """Seconds of copying as many bytes."""
        source = self.part(self.flat[: self.copy.numel()], size)
        target = self.copy[source.data_ptr() - self.flat.data_ptr() :]
        began = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        return (time.perf_counter() - began) * size / source.numel()


def _serve(kind: type[Rank], pipe: Connection, core: int, layout: KVLayout, tokens: int) -> None:
    """A child: does what the pipe says until it closes."""
    rank = kind(core, layout, tokens)
    pipe.send(None)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, getattr(rank, name)(*arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Child:
    """A rank in a process of its own."""

    def __init__(self, kind: type[Rank], core: int, layout: KVLayout, tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(kind, theirs, core, layout, tokens), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def begin(self, name: str, *arguments: Any) -> None:
        """Give an order."""
        self._pipe.send((name, arguments))

    def end(self) -> Any:
        """What came of it."""
        if not self._pipe.poll(4 * _WAIT_S):
            raise RuntimeError("a rank does not answer")
        good, result = self._pipe.recv()
        if not good:
            raise RuntimeError(result)
        return result

    def call(self, name: str, *arguments: Any) -> Any:
        """Both."""
        self.begin(name, *arguments)
        return self.end()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


class Pair:
    """Both processes."""

    def __init__(self, layout: KVLayout, tokens: int) -> None:
        token_bytes = 2 * layout.layers * layout.kv_heads * layout.head_dim * 2
        tokens = max(tokens, POOL_BYTES // token_bytes)
        cores = sorted(os.sched_getaffinity(0))
        self.prefill = Child(Prefill, cores[0], layout, tokens)
        self.decode = Child(Decode, cores[-1], layout, tokens)
        self._legs = 0

    def open(self, params: TransferParams) -> tuple[str, bool]:
        """One more sender and receiver; the key to use them with."""
        self.decode.call("open", params)
        self.prefill.call("open", params)
        return params.transport, params.checksum

    def transfer(self, key: tuple[str, bool], tokens: int) -> tuple[float, int, int]:
        """Seconds, frames, messages."""
        self._legs += 1
        leg = (f"leg{self._legs}", 1, 0)
        ticket = self.decode.call("reserve", key, leg, tokens)
        result: tuple[float, int, int] = self.prefill.call("send", key, leg, ticket, tokens)
        self.decode.call("forget", key, leg)
        return result

    def check(self, key: tuple[str, bool], tokens: int) -> None:
        """Raises RuntimeError when what arrives is not what was sent."""
        self.decode.call("clear")
        self.transfer(key, tokens)
        if self.decode.call("checksum", tokens) != self.prefill.call("checksum", tokens):
            raise RuntimeError(f"{key}: wrong bytes arrived")

    def join_gloo(self) -> None:
        """Plain gloo between the two."""
        with tempfile.TemporaryDirectory() as folder:
            for rank, child in enumerate((self.prefill, self.decode)):
                child.begin("join_gloo", str(Path(folder, "store")), rank)
            for child in (self.prefill, self.decode):
                child.end()

    def gloo(self, size: int, message: int) -> float:
        """Seconds."""
        for rank, child in enumerate((self.prefill, self.decode)):
            child.begin("gloo", size, message, rank)
        seconds: float = self.prefill.end()
        self.decode.end()
        return seconds

    def cpu(self) -> tuple[float, float]:
        """Processor seconds of both so far."""
        return self.prefill.call("cpu"), self.decode.call("cpu")

    def close(self) -> None:
        """End both."""
        self.prefill.close()
        self.decode.close()


@contextmanager
def pair_of(layout: KVLayout, tokens: int) -> Iterator[Pair]:
    """Two processes for as long as needed."""
    pair = Pair(layout, tokens)
    try:
        yield pair
    finally:
        pair.close()


def alone_s(config: Config, tokens: int, repeats: int) -> float:
    """Median seconds of moving the KV of `tokens` tokens of a cluster's model, with that cluster's settings."""
    spec = SpecBuilder(config).worker("prefill-0", "one", 0, "")
    model = load_config(resolve(config.model_path))
    shape = Shape(config.model_path, model.layers, model.kv_heads, model.head_dim)
    dtype = spec.params.engine.dtype if spec.params.engine.kv_dtype == "auto" else spec.params.engine.kv_dtype
    with pair_of(replace(shape.layout(spec.params.engine.block_size), dtype=dtype), tokens) as pair:
        transport: Any = "shm" if spec.params.transfer.transport == "auto" else spec.params.transfer.transport
        key = pair.open(replace(spec.params.transfer, host="127.0.0.1", transport=transport))
        pair.check(key, tokens)
        return statistics.median(pair.transfer(key, tokens)[0] for _ in range(repeats + 1))


def rounds(pair: Pair, keys: list[tuple[str, bool]], shape: Shape, tokens: int, repeats: int) -> list[Row]:
    """All rows of one amount, measured in turns."""
    size = shape.bytes(tokens)
    times: dict[str, list[float]] = {}
    cpu: dict[str, list[tuple[float, float]]] = {}
    counts: dict[str, tuple[int, int]] = dict.fromkeys(("memcpy", *MESSAGES), (0, 0))
    for key in keys:
        pair.check(key, tokens)
    for message in MESSAGES.values():
        pair.gloo(size, message)
    pair.prefill.call("memcpy", size)

    def measured(name: str, call: Callable[[], float]) -> None:
        before = pair.cpu()
        times.setdefault(name, []).append(call())
        after = pair.cpu()
        cpu.setdefault(name, []).append((after[0] - before[0], after[1] - before[1]))

    def ours(key: tuple[str, bool], name: str) -> float:
        seconds, frames, messages = pair.transfer(key, tokens)
        counts[name] = (frames, max(messages, counts.get(name, (0, 0))[1]))
        return seconds

    for _ in range(repeats):
        measured("memcpy", lambda: float(pair.prefill.call("memcpy", size)))
        for name, message in MESSAGES.items():
            measured(name, partial(pair.gloo, size, message))
        for key in keys:
            name = key[0] + ("+sum" if key[1] else "")
            measured(name, partial(ours, key, name))
    median = {name: statistics.median(each) for name, each in times.items()}
    return [
        Row(
            shape=shape.name,
            tokens=tokens,
            bytes=size,
            way=name,
            seconds=taken,
            gb_s=size / taken / 1e9,
            of_memcpy=median["memcpy"] / taken,
            of_gloo=median["raw gloo"] / taken,
            messages=counts[name][1],
            frames=counts[name][0],
            sender_cpu_s=statistics.median(one for one, _ in cpu[name]),
            receiver_cpu_s=statistics.median(other for _, other in cpu[name]),
        )
        for name, taken in median.items()
    ]


def show(rows: list[Row]) -> None:
    """One line a row, and what checksums cost."""
    print(f"{rows[0].shape}, {rows[0].tokens} tokens, {rows[0].bytes / 1e6:.1f} MB")
    for row in rows:
        about = f"{row.messages:4d} messages, {row.frames:5d} frames" if row.messages else ""
        print(
            f"  {row.way:11} {row.seconds * 1e3:9.2f} ms {row.gb_s:6.2f} GB/s, {row.of_memcpy:5.0%} of memcpy, "
            f"{row.of_gloo:5.0%} of raw gloo, cpu {row.sender_cpu_s * 1e3:7.1f} + "
            f"{row.receiver_cpu_s * 1e3:7.1f} ms  {about}"
        )
    by_way = {row.way: row.seconds for row in rows}
    costs = [f"{way} {(by_way[way + '+sum'] - by_way[way]) * 1e3:+.2f} ms" for way in by_way if f"{way}+sum" in by_way]
    if costs:
        print(f"  checksums: {', '.join(costs)}", flush=True)


def fits(shape: Shape, tokens: int) -> bool:
    """Whether both pools, the copy and every carrier's buffers have room."""
    need = 3 * shape.bytes(tokens) + (2 << 30)
    return need < psutil.virtual_memory().available


def peer_row(arguments: argparse.Namespace, shape: Shape, tokens: int, rows: list[Row]) -> Row:
    """The other engine's figure for the same bytes. Raises RuntimeError with its output when it fails."""
    script = Path(__file__).with_name("kv_peers.py")
    what = [str(shape.layers), str(shape.kv_heads), str(shape.head_dim), str(tokens), str(arguments.repeats)]
    done = subprocess.run(
        [arguments.peer_python, str(script), arguments.peer, *what], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"{arguments.peer}: {done.stderr[-2000:]}")
    seconds = float(json.loads(done.stdout.splitlines()[-1])["seconds"])
    by_way = {row.way: row.seconds for row in rows}
    return Row(
        shape=shape.name,
        tokens=tokens,
        bytes=shape.bytes(tokens),
        way=arguments.peer,
        seconds=seconds,
        gb_s=shape.bytes(tokens) / seconds / 1e9,
        of_memcpy=by_way["memcpy"] / seconds,
        of_gloo=by_way["raw gloo"] / seconds,
        messages=0,
        frames=0,
        sender_cpu_s=0.0,
        receiver_cpu_s=0.0,
    )


def main() -> None:
    """Prints the rows of each amount of KV as they are ready."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 and 1024 tokens only")
    parser.add_argument("--repeats", type=int, default=0, help="rounds (0: 9 for small amounts, 3 for large)")
    parser.add_argument("--frame-bytes", type=int, default=_PARAMS.frame_bytes)
    parser.add_argument("--carriers", nargs="+", default=list(CARRIERS), choices=CARRIERS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", choices=("mooncake", "nixl"))
    parser.add_argument("--peer-python", default=sys.executable)
    arguments = parser.parse_args()
    amounts = TOKENS[:2] if arguments.quick else TOKENS
    result: list[Row] = []
    for shape in SHAPES:
        able = [tokens for tokens in amounts if fits(shape, tokens)]
        for tokens in sorted(set(amounts) - set(able)):
            size = shape.bytes(tokens) / 1e9
            print(f"{shape.name}, {tokens} tokens: left out, {size:.1f} GB of KV do not fit", file=sys.stderr)
        with pair_of(shape.layout(BLOCK), max(able)) as pair:
            pair.join_gloo()
            keys = [
                pair.open(replace(_PARAMS, transport=carrier, checksum=checked, frame_bytes=arguments.frame_bytes))
                for carrier in arguments.carriers
                for checked in (False, True)
            ]
            for tokens in able:
                repeats = arguments.repeats or (9 if shape.bytes(tokens) < 1 << 28 else 3)
                rows = rounds(pair, keys, shape, tokens, repeats)
                if arguments.peer:
                    rows.append(peer_row(arguments, shape, tokens, rows))
                result += rows
                if not arguments.json:
                    show(rows)
    if arguments.json:
        print(json.dumps([asdict(row) for row in result]))


if __name__ == "__main__":
    main()
