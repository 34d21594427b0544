"""Linux process tools: ties a child to its parent's life, lists and ends descendants, counts usable cores."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        raise OSError("baton runs on Linux only")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


def die_with_parent(kind: signal.Signals, parent: int | None = None) -> None:
    """Receive signal `kind` when the parent ends. `parent`: its expected pid; ends at once when it is gone already."""
    _prctl(_PR_SET_PDEATHSIG, kind)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def settle() -> None:
    """Python's collector leaves alone what a process has when it is ready: looking through all of it again would take a
    worker 95 ms, for which every stream waits."""
    gc.collect()
    gc.freeze()


def become_subreaper() -> None:
    """From now on orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _parents() -> dict[int, tuple[int, bool]]:
    """pid -> (parent's pid, whether it lives) of every process.

    Zombies count as parents: a process whose first thread has ended is one already while its others still end, and
    keeps its children until then.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                found[int(entry.name)] = (int(parent), state != "Z")
    return found


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, at any depth."""
    parents = _parents()
    found: list[int] = []
    level = {pid}
    while level:
        level = {child for child, (parent, _) in parents.items() if parent in level}
        found += sorted(pid for pid in level if parents[pid][1])
    return found


def reap() -> None:
    """Collect every child that has ended. Only for a process that waits for none of them by other means."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_descendants(timeout_s: float = 3.0) -> list[int]:
    """SIGKILL everything below this process until nothing is left, or `timeout_s` is over; returns what lives."""
    deadline = time.monotonic() + timeout_s
    looks = 2  # without anybody: who changes parents during one look may be missed
    while looks and time.monotonic() < deadline:
        left = descendants(os.getpid())
        looks = 2 if left else looks - 1
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        reap()
    return descendants(os.getpid())


def bind(cores: Collection[int]) -> None:
    """Run on these cores only: every thread of this process, and each that one of them will start.

    Raises ValueError for cores that this process may not use.
    """
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing:
        raise ValueError(f"cores {missing} are not among those available here, {sorted(os.sched_getaffinity(0))}")
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def available_cores() -> int:
    """Cores that this process may use: its affinity mask, and the CPU quota of its control group (at least 1)."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return max(1, min(cores, int(quota)) if quota is not None else cores)


def _own_cgroup() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:].strip("/")
    return ""


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), group: str | None = None) -> float | None:
    """Cores' worth of CPU time that the control group and those above it allow, if they set a limit."""
    limits: list[float] = []
    folder = root / (_own_cgroup() if group is None else group)
    while True:
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            limits.append(float(quota) / float(period))  # "max" is no float
        if folder in (root, root.parent):
            break
        folder = folder.parent
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            limits.append(quota_us / int((root / "cpu/cpu.cfs_period_us").read_text()))
    return min(limits) if limits else None


def threads_per_rank(ranks: int, cores: int) -> int:
    """Torch threads of each of `ranks` processes that share `cores`."""
    return max(1, cores // max(1, ranks))
