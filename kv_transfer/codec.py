"""What a payload's bytes mean: element type and codec on the wire, and the way from one pool's elements to the other's.

| codec | payload of a box of R = layers * 2 * heads * tokens rows |
|---|---|
| `raw` | [layers, 2, heads, tokens, row] of the wire's element type: values, or codes and their scale |
| `int8`, `fp8` | R float32 scales [layers, 2, heads, tokens], then the codes, a byte per value, in the order of `raw` |

`raw` travels in the narrower of the two pools' types (`wire_dtype`), rounded by torch once, so the decode pool holds
what `prefill.to(dtype)` would. Rows of a quantised pool (kernels/kv_rows.py) are the narrowest: for a quantised decode
pool prefill makes the codes, as that pool's own writer would; between two pools of one kind they travel as they are.
The other codecs (kernels/kv_quantize.py) encode the prefill pool's own elements, carry every finite value within their
error, and refuse any other: the leg fails instead of going on with wrong numbers. They are for pools of floats: KV of
a quantised pool is as small already.
`raw` carries NaN and infinities as they are, and makes an infinity of what is too large for float16, as a pool of that
type does by itself. Where the wire has the pool's own type the pool copies straight into and out of the carrier's
buffer (`direct`), and neither `encode` nor `decode` is in the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.kv_quantize import CODES, dequantize, quantize
from ..kernels.kv_rows import KINDS, convert, plain, row_width
from .frames import RAW, cell_bytes, item_bytes, payload_shape, torch_dtype
from .plan import Box

WIRES = (RAW, *CODES)

_SCALE_BYTES = 4


def wire_dtype(source: str, target: str, codec: str) -> str:
    """The element type that frame headers name: what `codec` is applied to, for pools of these types.

    For `raw` the narrower of the two, the source's where they are equally wide; for the others the source's. Raises
    ValueError for a dtype or codec that is not known.
    """
    _check(codec)
    narrower = item_bytes(target) < item_bytes(source)
    return target if codec == RAW and narrower else source


def wire_cell_bytes(head_dim: int, dtype: str, codec: str) -> int:
    """Bytes of one (token, layer, head) on the wire. Raises ValueError for a dtype or codec that is not known."""
    _check(codec)
    raw = cell_bytes(head_dim, dtype)
    return raw if codec == RAW else 2 * (_SCALE_BYTES + head_dim)


def wire_bytes(box: Box, head_dim: int, dtype: str, codec: str) -> int:
    """Bytes of a box's payload. Raises ValueError for a dtype or codec that is not known."""
    return box.volume * wire_cell_bytes(head_dim, dtype, codec)


def direct(pool: torch.dtype, dtype: str, codec: str) -> bool:
    """Whether the payload is the pool's own elements, so that it is copied once and not converted."""
    return codec == RAW and torch_dtype(dtype) == pool


def encode(kv: Tensor, out: Tensor, dtype: str, codec: str) -> None:
    """Write KV of the pool's type, [layers, 2, heads, tokens, row], as a payload into `out` (flat uint8).

    `out` has exactly `wire_bytes` and begins at a multiple of 4 bytes. Raises ValueError for a dtype or codec that is
    not known, for a value that the codec cannot express, and for codes that are to be coded again.
    """
    _check(codec)
    if codec == RAW:
        rows = plain(convert(kv, torch_dtype(dtype)))
        out.view(rows.dtype).view(rows.shape).copy_(rows)
    elif kv.dtype in KINDS:
        raise ValueError(f"KV of a quantised pool ({KINDS[kv.dtype]}) travels raw only, not as {codec}")
    elif out.device != kv.device:  # computed where the pool is, and the smaller form crosses over
        near = torch.empty_like(out, device=kv.device)
        encode(kv, near, dtype, codec)
        out.copy_(near)
    else:
        scales, codes = _parts(out, kv.shape[-1], codec)
        quantize(kv.reshape(-1, kv.shape[-1]), codec, codes, scales)


def decode(payload: Tensor, box: Box, head_dim: int, dtype: str, codec: str, pool: torch.dtype) -> Tensor:
    """A payload (flat uint8) as KV [layers, 2, heads, tokens, row] of type `pool`; a view where nothing changes.

    Raises ValueError for a dtype or codec that is not known, and for bytes that `encode` does not write.
    """
    _check(codec)
    if codec == RAW:
        kind = torch_dtype(dtype)
        return convert(payload.view(kind).view(payload_shape(box, row_width(head_dim, kind))), pool)
    scales, codes = _parts(payload, head_dim, codec)
    values = torch.empty(codes.shape, dtype=pool, device=payload.device)
    dequantize(codes, scales, values)
    return values.view(payload_shape(box, head_dim))


def _check(codec: str) -> None:
    if codec not in WIRES:
        raise ValueError(f"KV codec {codec!r} is not one of {', '.join(WIRES)}")


def _parts(payload: Tensor, head_dim: int, codec: str) -> tuple[Tensor, Tensor]:
    """Scales [R] and codes [R, head_dim] as views of a quantised payload."""
    rows = payload.numel() // (_SCALE_BYTES + head_dim)
    scales = payload[: rows * _SCALE_BYTES].view(torch.float32)
    return scales, payload[rows * _SCALE_BYTES :].view(CODES[codec]).view(rows, head_dim)
