"""A carrier between this process and a child of it: whether frames arrive whole, and how fast. For `baton doctor`.

python -m baton.kv_transfer.loopback NAME HOST ADDRESS LIMIT_S FRAMES FRAME_BYTES    (the child: a prefill end)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time

import torch

from .carrier_build import build_carrier
from .carriers import Carrier
from .params import TransferParams
from .wire import Payload, Wire, WireError

_STARTED_S = 60.0  # a process that imports torch and touches a GPU


class LoopbackFailed(Exception):
    """The carrier cannot be built, or does not bring what was sent."""


def measure(name: str, host: str, limit_s: float, frames: int, frame_bytes: int, device: str | None = None) -> float:
    """Bytes per second of the carrier `name` over `frames` frames of `frame_bytes` to a child process.

    host: an address of this machine. device: the child's CUDA_VISIBLE_DEVICES; None: as here. Raises LoopbackFailed.
    """
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(_STARTED_S)
        address = f"{host}:{listener.getsockname()[1]}"
        numbers = (str(limit_s), str(frames), str(frame_bytes))
        code = "import sys; from baton.kv_transfer.loopback import send; send(*sys.argv[1:])"
        environment = os.environ if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        secret = secrets.token_hex(16)
        command = [sys.executable, "-c", code, name, host, address, *numbers]
        child = subprocess.Popen(command, env={**environment, "BATON_LOOPBACK": secret}, stderr=subprocess.PIPE)
        try:
            connection, _ = listener.accept()
            with contextlib.closing(Wire(connection, limit_s)) as wire:
                return _receive(wire, secret, name, host, frames, frame_bytes)
        except (WireError, OSError) as error:
            child.kill()
            said = (child.communicate()[1] or b"").decode(errors="replace").strip().splitlines()
            raise LoopbackFailed(f"{name}: {error}" + (f" ({said[-1][:200]})" if said else "")) from error
        finally:
            child.kill()
            child.wait()
            if child.stderr is not None:
                child.stderr.close()


def send(name: str, host: str, address: str, limit_s: str, frames: str, frame_bytes: str) -> None:
    """The child: frame i is full of the byte i."""
    wire = Wire.connect(address, float(limit_s))
    wire.send("loopback", secret=os.environ["BATON_LOOPBACK"])
    count, size = int(frames), int(frame_bytes)
    carrier = _built(name, wire, 0, host, float(limit_s), size)
    carrier.begin(count * size)
    for number in range(count):
        carrier.send(carrier.buffer(size).fill_(number % 251))
    wire.receive()  # the other end has them
    carrier.close()


def _receive(wire: Wire, secret: str, name: str, host: str, frames: int, frame_bytes: int) -> float:
    hello = wire.receive()
    if not isinstance(hello, dict) or hello.get("secret") != secret:
        raise WireError("somebody else connected")
    carrier = _built(name, wire, 1, host, wire.limit_s, frame_bytes)
    try:
        if carrier.name == "inline" and not isinstance(wire.receive(), Payload):
            raise WireError("no payload came")
        for _ in range(frames):
            carrier.expect(frame_bytes)
        started, wrong = 0.0, 0
        for number in range(frames):
            frame = carrier.receive(frame_bytes)
            wrong += int((frame != number % 251).sum())
            carrier.release()
            started = started or time.monotonic()  # behind the first frame: what comes before is setting up
        seconds = time.monotonic() - started
        wire.send("done")
    finally:
        carrier.close()
    if wrong:
        raise WireError(f"{wrong} bytes arrived wrong")
    return (frames - 1) * frame_bytes / max(seconds, 1e-9)


def _built(name: str, wire: Wire, rank: int, host: str, limit_s: float, frame_bytes: int) -> Carrier:
    params = TransferParams(
        host=host,
        connect_timeout_s=limit_s,
        frame_timeout_s=2 * limit_s,
        idle_close_s=limit_s,
        transport="auto",
        wire="raw",
        tls=None,
        max_links=1,
        checksum=False,
        max_outstanding=1,
        frame_bytes=frame_bytes,
    )
    carrier, reason = build_carrier(name, wire, rank, params)
    if reason:
        raise WireError(reason)
    return carrier


def nccl_alone(host: str, limit_s: float) -> None:
    """A sum over one rank on the current GPU: NCCL is there and starts. Raises RuntimeError, ValueError."""
    from ..kernels.process_group import ReplicatedStore, make_group

    store = ReplicatedStore(lambda key, value: None, limit_s)
    group = make_group("nccl", store, 0, 1, limit_s, host)
    numbers = torch.arange(8.0, device="cuda")
    group.allreduce([numbers]).wait()
    if numbers.tolist() != [float(number) for number in range(8)]:
        raise RuntimeError("NCCL returned a wrong sum")
    group.abort()
