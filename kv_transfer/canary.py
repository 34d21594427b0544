"""The start-up canary of a link: one synthetic block through the very carrier that frames will use, never placed.

Both ends compute the block from a number that the decode rank drew for this link, so a carrier that drops, swaps,
shifts or reinterprets anything cannot bring what is expected. The prefill rank leads:

| prefill | decode |
|---|---|
| `canary` {carrier, dtype, codec, bytes} | `canary_ready` {reason}: not empty, it will not take it |
| the payload, through the carrier | `canary_seen` {reason}: empty, it is bit for bit what was expected |

After a bad canary the prefill rank tries again over `inline`; after a bad one there the link is refused. Until a good
one the decode rank takes nothing else on the link. When a link changes to `inline` later, another canary goes before
the first frame there (`repeat_canary`); other messages may pass meanwhile, and a bad one ends the link.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ..kernels.kv_rows import row_width
from .carriers import INLINE, Carrier, CarrierFailed, InlineCarrier
from .codec import decode, encode, wire_bytes
from .frames import RAW, payload_shape, torch_dtype
from .plan import Box
from .wire import Payload, Wire, WireError, field

NONCE_BYTES = 16
BOX = Box(tokens=(0, 3), layers=(0, 2), heads=(0, 2))
_FP8_TOP = 448.0  # the largest value of float8_e4m3: with it in a row the row's scale is 1
_INT8_TOP = 127.0


def canary_values(nonce: bytes, head_dim: int, dtype: str, codec: str) -> torch.Tensor:
    """The block [layers, 2, heads, tokens, row] of element type `dtype`, exact under `codec`.

    Under `raw` every bit pattern of the element may occur.
    """
    kind = torch_dtype(dtype)
    shape = payload_shape(BOX, row_width(head_dim, kind))
    count = torch.Size(shape).numel()
    noise = torch.frombuffer(bytearray(hashlib.shake_128(nonce).digest(count * kind.itemsize)), dtype=torch.uint8)
    if codec == RAW:
        return noise.view(kind).view(shape)
    noise = noise[:count].to(torch.int32)
    if codec == "int8":
        values = (noise - 128).clamp(-127, 127)
        top = _INT8_TOP
    else:  # fp8: a sign and four significant bits
        values = (1 - 2 * (noise >> 7)) * (noise & 15) << ((noise >> 4) & 3)
        top = _FP8_TOP
    rows = values.to(kind).view(-1, head_dim)
    rows[:, 0] = top
    return rows.view(shape)


def canary_payload(nonce: bytes, head_dim: int, dtype: str, codec: str) -> torch.Tensor:
    """The block as it travels (flat uint8)."""
    payload = torch.empty(wire_bytes(BOX, head_dim, dtype, codec), dtype=torch.uint8)
    encode(canary_values(nonce, head_dim, dtype, codec), payload, dtype, codec)
    return payload


def canary_fault(payload: torch.Tensor, nonce: bytes, head_dim: int, dtype: str, codec: str) -> str:
    """What is wrong with an arrived block, as bytes and decoded; empty when every bit is right."""
    if wrong := int((payload.cpu() != canary_payload(nonce, head_dim, dtype, codec)).sum()):
        return f"{wrong} of {payload.numel()} bytes of the canary block arrived wrong"
    want = canary_values(nonce, head_dim, dtype, codec)
    try:
        got = decode(payload.cpu(), BOX, head_dim, dtype, codec, torch_dtype(dtype))
    except (RuntimeError, ValueError) as error:
        return f"the canary block cannot be decoded: {error}"
    different = want.contiguous().view(torch.uint8) != got.contiguous().view(torch.uint8)
    wrong = int(different.view(*want.shape, -1).any(-1).sum())
    return f"{wrong} of {want.numel()} values of the canary block were decoded wrong" if wrong else ""


def send_canary(wire: Wire, carrier: Carrier, nonce: bytes, head_dim: int, dtype: str, codec: str) -> str:
    """The prefill rank's side: what went wrong, empty when the block arrived whole. Raises WireError.

    A carrier that failed is closed.
    """
    payload = canary_payload(nonce, head_dim, dtype, codec)
    wire.send("canary", carrier=carrier.name, dtype=dtype, codec=codec, bytes=payload.numel())
    if reason := _answer(wire, "canary_ready"):
        return reason
    failure = ""
    try:
        carrier.begin(payload.numel())
        carrier.send(carrier.buffer(payload.numel()).copy_(payload))
    except CarrierFailed as error:
        carrier.close()  # its peer then fails at once too
        failure = str(error)
    return _answer(wire, "canary_seen") or failure


def repeat_canary(wire: Wire, nonce: bytes, head_dim: int, dtype: str, codec: str) -> None:
    """The same over `inline` on a link in use: at once, and both answers are left to the caller. Raises WireError."""
    payload = canary_payload(nonce, head_dim, dtype, codec)
    wire.send("canary", carrier=INLINE, dtype=dtype, codec=codec, bytes=payload.numel())
    carrier = InlineCarrier(wire)
    carrier.begin(payload.numel())
    carrier.send(payload)


def receive_canary(
    wire: Wire, carrier: Carrier, message: dict[str, Any], nonce: bytes, head_dim: int, dtype: str, codec: str
) -> str:
    """The decode rank's side, after the `canary` message: what went wrong, empty when every bit is right.

    Raises WireError.
    """
    size = wire_bytes(BOX, head_dim, dtype, codec)
    said = (field(message, "dtype", str), field(message, "codec", str), field(message, "bytes", int))
    if said != (dtype, codec, size):
        reason = f"the canary is {said[2]} bytes of {said[0]}/{said[1]}, due are {size} of {dtype}/{codec}"
        wire.send("canary_ready", reason=reason)
        return reason
    try:
        carrier.expect(size)
    except CarrierFailed as error:
        wire.send("canary_ready", reason=str(error))
        return str(error)
    wire.send("canary_ready", reason="")
    try:
        if carrier.name == INLINE:
            prefix = wire.receive()
            if not isinstance(prefix, Payload) or prefix.size != size:
                raise WireError("no canary came after its announcement")
        reason = canary_fault(carrier.receive(size), nonce, head_dim, dtype, codec)
        carrier.release()
    except CarrierFailed as error:
        reason = str(error)
    wire.send("canary_seen", reason=reason)
    return reason


def _answer(wire: Wire, kind: str) -> str:
    message = wire.receive()
    if not isinstance(message, dict) or message["kind"] != kind:
        raise WireError("the peer did not answer the canary")
    reason: str = field(message, "reason", str)
    return reason
