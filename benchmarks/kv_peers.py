"""Moves KV with another project's transfer engine, for benchmarks/kv_transfer.py; runs in that project's own Python.

    PYTHON benchmarks/kv_peers.py mooncake|nixl LAYERS KV_HEADS HEAD_DIM TOKENS REPEATS

Needs `mooncake-transfer-engine-non-cuda` or `nixl` and numpy, and nothing of ours. Two processes, a core each; pools
[layer][k|v][block][head][token][head_dim] of bfloat16; the sender writes into the receiver's registered memory, one
descriptor for each layer and k|v (all blocks are consecutive, which is their best case). No checksum, no check of who
may write where. Mooncake uses TCP, NIXL what UCX chooses. The last line printed is JSON: the median seconds of a write.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_POLL_S = 120.0
_KEPT: list[Any] = []  # engines live until the process ends


def regions(base: int, layers: int, size: int) -> list[tuple[int, int, int]]:
    """(address, bytes, device) of each layer's keys and values in a pool of so many bytes."""
    part = size // (2 * layers)
    return [(base + index * part, part, 0) for index in range(2 * layers)]


def mooncake(pool: Any, layers: int, pipe: Connection, sending: bool) -> Callable[[], None] | None:
    """The call that writes all KV; the receiving side only registers and waits."""
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found,unused-ignore]

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("mooncake does not start")
    base = pool.ctypes.data
    if engine.register_memory(base, pool.nbytes):
        raise RuntimeError("mooncake does not register the pool")
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", base))
    peer, theirs = pipe.recv()
    here, there = regions(base, layers, pool.nbytes), regions(theirs, layers, pool.nbytes)
    sources, targets = [at for at, _, _ in here], [at for at, _, _ in there]
    sizes = [size for _, size, _ in here]

    def write() -> None:
        if engine.batch_transfer_sync_write(peer, sources, targets, sizes):
            raise RuntimeError("mooncake's write failed")

    _KEPT.append(engine)
    return write if sending else None


def nixl(pool: Any, layers: int, pipe: Connection, sending: bool) -> Callable[[], None] | None:
    """Likewise."""
    from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,unused-ignore]

    agent = nixl_agent("sender" if sending else "receiver", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), pool.ctypes.data))
    metadata, theirs = pipe.recv()
    name = agent.add_remote_agent(metadata)
    here = agent.get_xfer_descs(regions(pool.ctypes.data, layers, pool.nbytes), "DRAM")
    there = agent.get_xfer_descs(regions(theirs, layers, pool.nbytes), "DRAM")

    def write() -> None:
        handle = agent.initialize_xfer("WRITE", here, there, name, b"done")
        if agent.transfer(handle) == "ERR":
            raise RuntimeError("nixl's write failed")
        while (state := agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise RuntimeError("nixl's write failed")
        agent.release_xfer_handle(handle)

    _KEPT.append(agent)
    return write if sending else None


ENGINES = {"mooncake": mooncake, "nixl": nixl}


def receive(engine: str, size: int, layers: int, core: int, pipe: Connection) -> None:
    """The other process: registers its pool, and says afterwards whether it holds what was sent."""
    os.sched_setaffinity(0, {core})
    pool = np.zeros(size, dtype=np.uint8)
    ENGINES[engine](pool, layers, pipe, False)
    if pipe.poll(_POLL_S):
        want = pipe.recv()
        pipe.send(pool[:: 1 << 12].tobytes() == want)
    pipe.close()
    os._exit(0)


def main() -> None:
    """Prints the median."""
    engine, *numbers = sys.argv[1:]
    layers, heads, dim, tokens, repeats = (int(number) for number in numbers)
    size = 2 * layers * heads * dim * 2 * tokens
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    cores = sorted(os.sched_getaffinity(0))
    other = context.Process(target=receive, args=(engine, size, layers, cores[-1], theirs), daemon=True)
    other.start()
    os.sched_setaffinity(0, {cores[0]})
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    pool = np.resize(noise, size)
    write = ENGINES[engine](pool, layers, pipe, True)
    if write is None:
        raise RuntimeError(f"{engine} cannot write")
    write()
    times = []
    for _ in range(repeats or 5):
        began = time.perf_counter()
        write()
        times.append(time.perf_counter() - began)
    pipe.send(pool[:: 1 << 12].tobytes())
    if not pipe.poll(_POLL_S) or not pipe.recv():
        raise RuntimeError("the receiver does not hold what was sent")
    print(json.dumps({"seconds": statistics.median(times)}), flush=True)
    other.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
