"""The process that users see: it runs the driver as its child and ends every descendant when the driver ends.

Both are subreapers, so no descendant gets away: Ray's daemons, for instance, do not end by themselves after `kill -9`.
The driver, for its part, ends everything when the warden ends, which it learns from a pipe.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import FrameType

from .early import handled
from .processes import become_subreaper, kill_descendants

_VARIABLE = "BATON_WARDEN"  # "PID:FD:FOLDER" of the warden, its pipe and the run's temporary folder
_LONGEST = 15  # 107 less "/baton-", "/ray-", "/session_<time>_<pid>" and "/sockets/plasma_store"


def _temporary() -> str:
    """Where temporary files go: Ray puts sockets deep below, whose paths the kernel limits to 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST else "/tmp"


def supervised() -> bool:
    """Whether this process is the driver of a warden."""
    return _VARIABLE in os.environ


def supervise(command: Sequence[str]) -> int:
    """Run `command` as the driver, pass signals on, and leave nothing behind. Returns its exit code.

    The first signal reaches it as SIGTERM, which is quiet even before it has a handler; the second ends everything at
    once.
    """
    interrupted: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def on_signal(number: int, _: FrameType | None) -> None:
        interrupted.append(number)
        if child is not None and len(interrupted) == 1:
            child.send_signal(signal.SIGTERM)
        elif len(interrupted) > 1:
            kill_descendants()

    for kind in handled():
        signal.signal(kind, on_signal)
    become_subreaper()
    folder = tempfile.mkdtemp(prefix="baton-", dir=_temporary())
    reading, writing = os.pipe()
    environment = {
        **os.environ,
        _VARIABLE: f"{os.getpid()}:{reading}:{folder}",
        "TMPDIR": folder,
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # Ray forks only to execute
    }
    try:
        # a session of its own: Ctrl-C reaches the driver through us, once
        child = subprocess.Popen(command, env=environment, pass_fds=[reading], start_new_session=True)
        os.close(reading)
        return _wait(child, interrupted)
    finally:
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(writing)


def _wait(child: subprocess.Popen[bytes], interrupted: Sequence[int]) -> int:
    """The driver's exit code; meanwhile orphans that end are collected."""
    if interrupted:  # before there was a child
        child.send_signal(signal.SIGTERM)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:  # ended and collected by the second signal
            child.returncode = -signal.SIGKILL
            return 1
        if pid == child.pid:
            break
    code = child.returncode = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGTERM and interrupted:  # it had no handler yet
        print("baton: interrupted", file=sys.stderr)
        return 1
    if code < 0:
        name = signal.Signals(-code).name
        print(f"baton: the driver was killed by {name}; everything it started has been ended", file=sys.stderr)
        return 1
    return code


def attach() -> None:
    """In the driver: from now on the end of the warden is the end of this process and of all below it."""
    pid, pipe, folder = os.environ.pop(_VARIABLE).split(":", 2)  # no descendant takes itself for the driver
    become_subreaper()
    if os.getppid() != int(pid):  # the warden is gone already
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
    threading.Thread(target=_watch, args=(int(pipe), folder), daemon=True, name=f"warden-{pid}").start()


def _watch(pipe: int, folder: str) -> None:
    os.read(pipe, 1)  # returns when the other end is closed
    kill_descendants()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
