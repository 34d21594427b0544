"""Ends an operation of a process group from outside.

NCCL's point-to-point operations hang when the peer is gone, and only an abort from another thread frees them. (gloo's
fail by themselves, and an abort would not free them.)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_LOOK_S = 0.05


class Watchdog:
    """Calls `abort` once, from its own thread, when a watched operation runs too long or `peer_gone()` says so.

    `reason` then says which, and is empty before. `peer_gone` must not block.
    """

    def __init__(self, abort: Callable[[], None], peer_gone: Callable[[], bool]) -> None:
        self.reason = ""
        self._abort = abort
        self._peer_gone = peer_gone
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self, limit_s: float) -> Iterator[None]:
        """One operation, which may take `limit_s`."""
        with self._changed:
            self._deadline = time.monotonic() + limit_s
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._deadline = None

    def close(self) -> None:
        """Watch nothing any more; waits for the thread, unless an abort is what it is doing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self.reason:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if self._deadline is None:
                    self._changed.wait()
                    continue
                left = self._deadline - time.monotonic()
                self.reason = "it takes too long" if left <= 0 else "the peer is gone" if self._peer_gone() else ""
                if self.reason:
                    break
                self._changed.wait(min(left, _LOOK_S))
            else:
                return
        with contextlib.suppress(RuntimeError):
            self._abort()
