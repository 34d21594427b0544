"""What must be so before anything slow is imported.

Until a command has handlers of its own, nothing has been started yet, and an interrupt ends the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def quiet_grpc() -> None:
    """Keep gRPC's own log lines off stderr, here and in every process below, unless the user asks for them."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def handled() -> tuple[signal.Signals, ...]:
    """The signals that end a command: under nohup SIGHUP does not."""
    return tuple(kind for kind in SIGNALS if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"baton: interrupted\n")
    os._exit(1)


def prepare() -> None:
    """Called first, in the main thread."""
    quiet_grpc()
    for kind in handled():
        signal.signal(kind, _end)
