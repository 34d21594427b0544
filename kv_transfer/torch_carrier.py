"""The carriers that are torch process groups of two, one class for gloo and NCCL, and how a link's ends build them.

The group is built over the link itself: its rendezvous keys travel as control messages, so nothing else listens or is
configured. Both ends build it when the link opens, and each reports whether it could.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import deque
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from ..kernels.memory import prefer_huge_pages
from ..kernels.process_group import Group, ReplicatedStore, make_group
from .carriers import RING, CarrierFailed, patience_s
from .operations import OnStream, Operation, stream_of
from .watchdog import Watchdog
from .wire import Wire, WireError, field

_PUMP_S = 0.002
_PROBE_BYTES = 8


class TorchCarrier:
    """A process group of two: prefill is rank 0, decode rank 1. After any failure it is closed and never used again.

    A frame is one message, and RING buffers go round: the sender gathers the next frame while some are on their way,
    and waits for the oldest when all are; the receiver lets a few come while it places one. gloo moves them in a thread
    of its own, NCCL on a stream: there an operation is over when the event behind it is, for which the calling thread
    looks, so that it is never stuck in CUDA when the watchdog aborts the group.
    """

    def __init__(self, name: str, group: Group, limit_s: float, watchdog: Watchdog | None) -> None:
        self.name = name
        self.device = device_of(name)
        self._watchdog = watchdog
        self._group: Group | None = group
        self._peer = 1 - group.rank()
        self._limit_s = limit_s
        self._stream = stream_of(self.device)
        self._free: list[torch.Tensor] = []
        self._sending: deque[tuple[Operation, torch.Tensor, torch.Tensor]] = deque()  # with what was lent for it
        self._lent: torch.Tensor | None = None
        self._due: deque[int] = deque()  # sizes that are expected and not posted
        self._posted: deque[tuple[Operation, torch.Tensor, torch.Tensor]] = deque()

    def begin(self, size: int) -> None:
        """Every frame is a message of its own."""

    def buffer(self, size: int) -> torch.Tensor:
        """One of a few buffers, the peer having taken what was in it."""
        try:
            while len(self._sending) >= RING or (self._sending and self._sending[0][0].is_completed()):
                operation, whole, frame = self._sending[0]
                self._finish(operation, frame)
                self._sending.popleft()
                self._free.append(whole)
        except RuntimeError as error:
            raise CarrierFailed(_reason(self.name, error)) from error
        self._lent = self._take(size)
        return self._lent[:size]

    def ahead(self, size: int, number: int) -> torch.Tensor | None:
        """Buffers are taken in the order in which frames leave."""
        return None

    def send(self, frame: torch.Tensor) -> None:
        """Begin to send: a failure that is not seen here is seen by the receiving end, within the same limit."""
        whole, self._lent = self._lent, None
        try:
            with self._queued():
                operation = self._begun(self._open().send([frame], self._peer, 0))
        except RuntimeError as error:
            raise CarrierFailed(_reason(self.name, error)) from error
        self._sending.append((operation, frame if whole is None else whole, frame))

    def expect(self, size: int) -> None:
        """Post the receive if few are."""
        self._due.append(size)
        self._post()

    def receive(self, size: int) -> torch.Tensor:
        """Returns when the frame is here. A shorter message would leave its tail: sizes come from the announcement."""
        self.release()
        try:
            self._post()
            operation, whole, frame = self._posted.popleft()
            if frame.numel() != size:
                raise CarrierFailed(f"{self.name}: {size} bytes are wanted, {frame.numel()} were expected")
            self._finish(operation, frame)
        except RuntimeError as error:
            raise CarrierFailed(_reason(self.name, error)) from error
        self._lent = whole
        return frame

    def release(self) -> None:
        """Its buffer takes the next frame that is due."""
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None
            self._post()

    def close(self) -> None:
        """Abort what is in flight and let the group go, which closes its connection: the peer fails at once."""
        if self._watchdog is not None:
            self._watchdog.close()
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()
        self._sending.clear()
        self._posted.clear()
        self._due.clear()

    def _post(self) -> None:
        """Have receives under way for all buffers but the one that is being placed, if so many frames are due."""
        try:
            while self._due and len(self._posted) < RING - 1:
                size = self._due.popleft()
                whole = self._take(size)
                frame = whole[:size]
                with self._queued():
                    operation = self._begun(self._open().recv([frame], self._peer, 0))
                self._posted.append((operation, whole, frame))
        except RuntimeError as error:
            raise CarrierFailed(_reason(self.name, error)) from error

    def _take(self, size: int) -> torch.Tensor:
        """A free buffer of at least that size; the one that was used last, for the cache's sake."""
        if self._free and self._free[-1].numel() >= size:
            return self._free.pop()
        for at, buffer in enumerate(self._free):
            if buffer.numel() >= size:
                return self._free.pop(at)
        if self._free:
            self._free.pop()  # too small: the new one takes its place
        return prefer_huge_pages(torch.empty(size, dtype=torch.uint8, device=self.device))

    def _open(self) -> Group:
        if self._group is None:
            raise CarrierFailed(f"{self.name}: closed")
        return self._group

    def _limit(self, frame: torch.Tensor) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._limit_s + patience_s(self.name, frame.numel()))

    def _watched(self, frame: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        if self._watchdog is None:
            return contextlib.nullcontext()
        return self._watchdog.watching(self._limit(frame).total_seconds())

    def _queued(self) -> contextlib.AbstractContextManager[None]:
        """Operations are queued behind what the calling thread has queued, which made or read the buffer."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        scope: contextlib.AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return scope

    def _begun(self, work: Work) -> Operation:
        return work if self._stream is None else OnStream(work, self._stream)

    def _finish(self, operation: Operation, frame: torch.Tensor) -> None:
        """Returns when the operation is over. Raises RuntimeError when it failed, takes too long or was aborted."""
        with self._watched(frame):
            operation.wait(self._limit(frame))
        if self._watchdog is not None and self._watchdog.reason:
            raise RuntimeError(f"aborted: {self._watchdog.reason}")


class Rendezvous:
    """Builds a TorchCarrier on one end of a link, in a thread of its own, while `run` pumps keys over the wire."""

    def __init__(self, wire: Wire, name: str, rank: int, host: str, limit_s: float) -> None:
        self._wire = wire
        self._name = name
        self._rank = rank
        self._host = host
        self._limit_s = limit_s
        self._outgoing: list[tuple[str, bytes]] = []
        self._store = ReplicatedStore(self._publish, limit_s)
        self._lock = threading.Lock()
        self._result: TorchCarrier | Exception | None = None

    def run(self) -> tuple[TorchCarrier | None, str]:
        """The carrier, or None and the reason where either end could not build it. Raises WireError."""
        builder = threading.Thread(target=self._build, name=f"kv-{self._name}-rendezvous", daemon=True)
        builder.start()
        reported, theirs, reason = False, None, ""
        deadline = time.monotonic() + 2 * self._limit_s
        try:
            while not (reported and theirs is not None):
                if time.monotonic() > deadline:
                    raise WireError(f"no {self._name} rendezvous within {2 * self._limit_s:g} s")
                self._flush()
                if self._result is not None and not reported:
                    reason = "" if isinstance(self._result, TorchCarrier) else str(self._result)
                    self._flush()
                    self._wire.send("carrier", ready=not reason, reason=reason)
                    reported = True  # what comes after both reports is no longer for us to read
                elif self._wire.readable(_PUMP_S) and (report := self._handle(self._wire.receive())) is not None:
                    theirs = report
        finally:
            self._store.fail("the link's rendezvous is over")
            builder.join(self._limit_s)
        mine = self._result
        if isinstance(mine, TorchCarrier) and theirs == "":
            return mine, ""
        if isinstance(mine, TorchCarrier):
            mine.close()
        return None, reason or f"the peer has no {self._name}: {theirs}"

    def _handle(self, message: Any) -> str | None:
        """One message of the rendezvous; the peer's reason (empty: it is ready) when it reports, else None."""
        kind = message["kind"] if isinstance(message, dict) else "payload"
        if kind == "store":
            self._store.deliver(field(message, "key", str), field(message, "value", bytes))
            return None
        if kind == "carrier":
            if not field(message, "ready", bool):
                reason: str = field(message, "reason", str)
                self._store.fail(f"the peer gave up: {reason}")
                return reason or "unknown"
            return ""
        raise WireError(f"unexpected {kind} message during the carrier's rendezvous")

    def _publish(self, key: str, value: bytes) -> None:
        with self._lock:
            self._outgoing.append((key, value))

    def _flush(self) -> None:
        with self._lock:
            pairs, self._outgoing = self._outgoing, []
        for key, value in pairs:
            self._wire.send("store", key=key, value=value)

    def _build(self) -> None:
        try:
            group = make_group(self._name, self._store, self._rank, 2, self._limit_s, self._host)
            watchdog = Watchdog(group.abort, self._wire.peer_gone) if self._name == "nccl" else None
            carrier = TorchCarrier(self._name, group, self._limit_s, watchdog)
            if self._rank == 0:  # the pair's first use can take long with NCCL: pay it here
                carrier.send(carrier.buffer(_PROBE_BYTES).fill_(7))
            else:
                carrier.expect(_PROBE_BYTES)
                carrier.receive(_PROBE_BYTES)
            self._result = carrier
        except (RuntimeError, ValueError, OSError, CarrierFailed) as error:
            self._result = error


def device_of(name: str) -> torch.device:
    """Where a carrier's payloads must be."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "nccl" else torch.device("cpu")


def _reason(name: str, error: Exception) -> str:
    return f"{name}: {str(error).splitlines()[0][:200]}"
