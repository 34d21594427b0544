"""One message of a process group on its way: gloo's own handle, or an event on a stream."""

from __future__ import annotations

import datetime
import time
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

_LOOK_S = 0.00005


class Operation(Protocol):
    """A message on its way."""

    def is_completed(self) -> bool: ...
    def wait(self, limit: datetime.timedelta, /) -> object: ...


class OnStream:
    """An operation of NCCL, which is over when the event behind it is."""

    def __init__(self, work: Work, stream: Any) -> None:
        work.wait()  # orders the stream behind it, and returns at once
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def is_completed(self) -> bool:
        """Whether the bytes are there, or were taken."""
        return bool(self._event.query())

    def wait(self, limit: datetime.timedelta) -> None:
        """Raises RuntimeError after `limit`."""
        deadline = time.monotonic() + limit.total_seconds()
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"an operation takes more than {limit.total_seconds():g} s")
            time.sleep(_LOOK_S)


def stream_of(device: torch.device) -> Any:
    """One of the carrier's own; None on a CPU."""
    kind: Any = torch.cuda.Stream
    return kind(device) if device.type == "cuda" else None
