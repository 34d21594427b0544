"""What moves a frame's payload, once the receiver has accepted its header.

`inline` uses the link's own socket. `TorchCarrier` is a torch process group of two (gloo or NCCL, one class) that is
built over the link itself: its rendezvous keys travel as control messages, so nothing else listens or is configured.
Both ends build it when the link opens, each reports whether it could, and the link stays inline unless both did.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import deque
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from ..kernels.process_group import Group, ReplicatedStore, make_group
from .frames import MAX_PARCEL_BYTES
from .watchdog import Watchdog
from .wire import Wire, WireError, field

INLINE = "inline"
_PUMP_S = 0.002
_SLOWEST = 16 << 20  # bytes a second


class CarrierFailed(Exception):
    """The carrier is of no use any more; the link itself may be."""


class Carrier(Protocol):
    """Moves payloads (uint8, one dimension) in the order of the accepted headers."""

    name: str
    device: torch.device  # where payloads must be
    largest: int  # bytes of one payload

    def send(self, payload: torch.Tensor) -> None:
        """Hand over one payload, which stays as it is until the peer acknowledged it or the carrier was closed.

        Raises CarrierFailed, or WireError where the link itself broke.
        """
        ...

    def receive(self, buffer: torch.Tensor) -> None:
        """Fill a buffer of exactly the announced size. Raises like `send`."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class InlineCarrier:
    """Payloads on the link's own socket."""

    name = INLINE
    device = torch.device("cpu")
    largest = MAX_PARCEL_BYTES

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, payload: torch.Tensor) -> None:
        """Write a payload message."""
        self._wire.send_payload(bytes_of(payload))

    def receive(self, buffer: torch.Tensor) -> None:
        """Read the bytes after a payload prefix."""
        self._wire.receive_into(bytes_of(buffer))

    def close(self) -> None:
        """The socket belongs to the link."""


class TorchCarrier:
    """A process group of two: prefill is rank 0, decode rank 1. After any failure it is closed and never used again."""

    def __init__(self, name: str, group: Group, limit_s: float, watchdog: Watchdog | None) -> None:
        self.name = name
        self._watchdog = watchdog
        self.device = device_of(name)
        self._group: Group | None = group
        self.largest = MAX_PARCEL_BYTES
        self._peer = 1 - group.rank()
        self._limit_s = limit_s
        self._sending: deque[tuple[Work, torch.Tensor]] = deque()  # gloo moves them in a thread of its own
        self._expected: dict[int, Work] = {}  # by the buffer's address

    def send(self, payload: torch.Tensor) -> None:
        """Begin to send: a failure that is not seen here is seen by the receiving end, within the same limit."""
        try:
            while self._sending and self._sending[0][0].is_completed():
                self._sending.popleft()[0].wait()
            with self._watched(payload):
                work = self._open().send([payload], self._peer, 0)
                if self.device.type == "cpu":
                    self._sending.append((work, payload))
                else:  # a stream orders the copies
                    work.wait(self._limit(payload))
                    self._settle()
        except RuntimeError as error:
            raise CarrierFailed(_reason(self.name, error)) from error

    def expect(self, buffer: torch.Tensor) -> None:
        """Let the next payload come into `buffer` while the caller does something else; `receive` it later."""
        if self.device.type == "cpu":
            try:
                self._expected[buffer.data_ptr()] = self._open().recv([buffer], self._peer, 0)
            except RuntimeError as error:
                raise CarrierFailed(_reason(self.name, error)) from error

    def receive(self, buffer: torch.Tensor) -> None:
        """Returns when the buffer is filled. A shorter message would leave its tail: sizes come from the header."""
        try:
            with self._watched(buffer):
                work = self._expected.pop(buffer.data_ptr(), None) or self._open().recv([buffer], self._peer, 0)
                work.wait(self._limit(buffer))
                self._settle()
        except RuntimeError as error:
            raise CarrierFailed(_reason(self.name, error)) from error

    def close(self) -> None:
        """Abort what is in flight and let the group go, which closes its connection: the peer fails at once."""
        if self._watchdog is not None:
            self._watchdog.close()
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()
        self._sending.clear()
        self._expected.clear()

    def _open(self) -> Group:
        if self._group is None:
            raise CarrierFailed(f"{self.name}: closed")
        return self._group

    def _limit(self, buffer: torch.Tensor) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._limit_s + patience_s(self.name, buffer.numel()))

    def _watched(self, buffer: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        if self._watchdog is None:
            return contextlib.nullcontext()
        return self._watchdog.watching(self._limit(buffer).total_seconds())

    def _settle(self) -> None:
        """NCCL's wait only orders streams; the bytes are there when the stream has drained."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


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
            probe = torch.full((8,), 7, dtype=torch.uint8, device=carrier.device)
            if self._rank == 0:  # the pair's first use can take long with NCCL: pay it here
                carrier.send(probe)
            else:
                carrier.receive(probe)
            self._result = carrier
        except (RuntimeError, ValueError, OSError, CarrierFailed) as error:
            self._result = error


def patience_s(name: str, size: int) -> float:
    """How many seconds more than usual `size` bytes may take on a carrier that does not show how far it is."""
    return 0.0 if name == INLINE else size / _SLOWEST


def device_of(name: str) -> torch.device:
    """Where a carrier's payloads must be."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "nccl" else torch.device("cpu")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _reason(name: str, error: Exception) -> str:
    return f"{name}: {str(error).splitlines()[0][:200]}"
