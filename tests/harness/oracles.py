"""The six oracles of the field reports, from a cluster's outside: O-eq, O-pool, O-live, O-proc, O-acct, O-beat.

Each raises AssertionError with what was seen.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from .client import Client
from .hf_reference import difference, greedy, load_reference

_POLL_S = 0.05
_LISTEN = "0A"  # as /proc/net/tcp writes it
_WORKER_IDLE = ("baton_kv_used_blocks", "baton_kv_held_legs", "baton_worker_running", "baton_worker_waiting")
_ROUTER_IDLE = (
    "baton_router_inflight_requests",
    "baton_router_queued_requests",
    "baton_prefill_prealloc_queue_requests",
)

Metrics = dict[str, dict[tuple[tuple[str, str], ...], float]]  # name -> sorted labels -> value


def scrape(http: str) -> Metrics:
    """/metrics of the router at the URL `http`."""
    text = httpx.get(f"{http}/metrics", timeout=30).raise_for_status().text
    found: Metrics = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Sum of a metric over all label sets that hold `labels`; 0 where it was never counted."""
    return sum(value for key, value in metrics.get(name, {}).items() if labels.items() <= dict(key).items())


# ---- O-eq ----------------------------------------------------------------------------------------------------


class Reference:
    """O-eq's oracle: the same weights in Transformers, float32, greedy."""

    def __init__(self, model: Path, stop_ids: frozenset[int]) -> None:
        self._model = load_reference(model)
        self._stop_ids = stop_ids

    def check(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], max_tokens: int, *, stops: bool = True
    ) -> None:
        """Our greedy `token_ids` are the reference's (ties within 3e-4 excepted). stops: an end of sequence ends it."""
        expected = greedy(self._model, prompt_ids, max_tokens, self._stop_ids if stops else frozenset())
        found = difference(token_ids, expected)
        assert not found, f"O-eq, prompt of {len(prompt_ids)}: {found}"

    def logprobs(self, ids: Sequence[int]) -> Any:
        """Log probabilities [len(ids), vocab] of what follows each prefix of `ids`."""
        with torch.inference_mode():
            return self._model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)


# ---- O-pool, O-acct, O-live ----------------------------------------------------------------------------------


def pool_leftovers(metrics: Metrics) -> list[str]:
    """Every gauge that is not 0 although nothing should be running, or that is not exported at all."""
    missing = [f"{name} is missing" for name in (*_WORKER_IDLE, *_ROUTER_IDLE) if not metrics.get(name)]
    return missing + [
        f"{name}{dict(key)} = {value:g}"
        for name in (*_WORKER_IDLE, *_ROUTER_IDLE)
        for key, value in metrics.get(name, {}).items()
        if value != 0
    ]


def check_pool(http: str, within_s: float = 30.0) -> None:
    """O-pool: on each worker nothing is referenced, held, running or waiting, within `within_s`."""
    deadline = time.monotonic() + within_s
    while left := pool_leftovers(scrape(http)):
        assert time.monotonic() < deadline, f"O-pool after {within_s} s: {left}"
        time.sleep(_POLL_S)


def check_accounts(http: str) -> None:
    """O-acct: accepted = completed + failed + cancelled."""
    metrics = scrape(http)
    names = ("accepted", "completed", "failed", "cancelled")
    accepted, *ends = (total(metrics, f"baton_requests_{name}_total") for name in names)
    assert accepted, "O-acct: no request was counted"
    assert accepted == sum(ends), f"O-acct: accepted {accepted:g}, completed, failed, cancelled {ends}"


def check_live(client: Client, within_s: float = 40.0) -> None:
    """O-live: a probe that needs both pools is served (2 tokens: the second comes from decode)."""
    answer = client.generate(within_s, token_ids=[104, 105], max_tokens=2, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == 2, f"O-live: {answer}"


# ---- O-proc --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What a process and its descendants hold on this machine."""

    processes: tuple[psutil.Process, ...]
    listeners: frozenset[tuple[int, int]]  # port and inode: who gets a port that was given back has another socket
    shared: frozenset[str]  # files under /dev/shm


def footprint(pid: int) -> Footprint:
    """Of the living process `pid` and everything below it."""
    root = psutil.Process(pid)
    processes = (root, *root.children(recursive=True))
    inodes: set[int] = set()
    shared: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            inodes |= _sockets(process.pid)
            shared.update(m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/"))
            shared.update(f.path for f in process.open_files() if f.path.startswith("/dev/shm/"))
    listeners = frozenset((port, inode) for port, inode in _listening() if inode in inodes)
    return Footprint(processes, listeners, frozenset(shared))


def _sockets(pid: int) -> set[int]:
    """Inodes of the sockets that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(descriptor).partition(":")
            if kind == "socket":
                found.add(int(inode.strip("[]")))
    return found


def _listening() -> set[tuple[int, int]]:
    """Port and inode of every TCP socket that listens on this machine."""
    lines = (line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:])
    rows = (line.split() for line in lines)
    return {(int(row[1].rpartition(":")[2], 16), int(row[9])) for row in rows if row[3] == _LISTEN}


def _proc_leftovers(before: Footprint) -> list[str]:
    left = []
    for process in before.processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"process {process.pid} {' '.join(process.cmdline())[:120]}")
    left += [f"port {port}" for port, _ in sorted(before.listeners & _listening())]
    return left + [path for path in sorted(before.shared) if Path(path).exists()]


def check_processes(before: Footprint, within_s: float = 40.0) -> None:
    """O-proc: of what `before` saw, no process lives, no port listens, no shared memory remains, within `within_s`."""
    deadline = time.monotonic() + within_s
    while left := _proc_leftovers(before):
        assert time.monotonic() < deadline, f"O-proc after {within_s} s: {left}"
        time.sleep(_POLL_S)


# ---- O-beat --------------------------------------------------------------------------------------------------


class Beat:
    """The slowest answer to a liveness probe while `beating` ran. What other processes took of the machine meanwhile
    does not count: at most as much as the router itself computed."""

    worst_s = 0.0


@contextlib.contextmanager
def beating(http: str, router_pid: int, period_s: float = 0.05) -> Iterator[Beat]:
    """O-beat from outside: asks /health every `period_s`; an event loop that stands still answers late."""
    beat, stop, router = Beat(), threading.Event(), psutil.Process(router_pid)

    def probe() -> None:
        with httpx.Client(timeout=30) as client:
            while not stop.wait(period_s):
                start, used = time.monotonic(), sum(router.cpu_times()[:2])
                client.get(f"{http}/health")
                took, used = time.monotonic() - start, sum(router.cpu_times()[:2]) - used
                beat.worst_s = max(beat.worst_s, min(took, used))

    thread = threading.Thread(target=probe, name="beat")
    thread.start()
    try:
        yield beat
    finally:
        stop.set()
        thread.join()
