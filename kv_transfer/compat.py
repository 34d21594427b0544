"""Whether one worker's KV can become another's (pure), and the readable difference where it cannot.

Tensor parallelism, block size and the element type are converted on the way; everything else must be equal.
"""

from __future__ import annotations

from ..kernels.kv_quantize import CODES
from ..proto.kv_layout import KVLayout
from .frames import DTYPES, RAW

_EQUAL = ("fingerprint", "layers", "kv_heads", "head_dim", "rope")


def differences(prefill: KVLayout, decode: KVLayout) -> list[str]:
    """What stands in the way of sending from `prefill` to `decode`, one line each; empty when nothing does."""
    found = [
        f"{name}: prefill has {getattr(prefill, name)!r}, decode has {getattr(decode, name)!r}"
        for name in _EQUAL
        if getattr(prefill, name) != getattr(decode, name)
    ]
    if found:  # what follows counts heads, which must be believable for that
        return found
    for side, layout in (("prefill", prefill), ("decode", decode)):
        found.extend(f"{side}: {fault}" for fault in _faults(layout))
    return found


def codec_differences(prefill: str, decode: str, dtypes: tuple[str, str]) -> list[str]:
    """What stands in the way when the two ends are configured with these wire codecs, as `differences`.

    dtypes: of the prefill and the decode pool.
    """
    if prefill != decode:
        return [f"kv.wire: prefill has {prefill!r}, decode has {decode!r}"]
    if coded := sorted(set(dtypes) & set(CODES)) if prefill != RAW else []:
        return [f"kv.wire: {prefill!r} with a pool of {coded[0]}, which is as small already; use 'raw'"]
    return []


def _faults(layout: KVLayout) -> list[str]:
    """What makes a layout meaningless by itself."""
    found = [
        f"{name} is {getattr(layout, name)!r}, not a positive number"
        for name in ("layers", "kv_heads", "head_dim", "block_size")
        if type(getattr(layout, name)) is not int or getattr(layout, name) < 1
    ]
    if type(layout.dtype) is not str or layout.dtype not in DTYPES:
        found.append(f"dtype is {layout.dtype!r}, not one of {', '.join(DTYPES)}")
    if found:
        return found
    outside = [span for span in layout.head_ranges if not 0 <= span[0] < span[1] <= layout.kv_heads]
    if outside:
        found.append(f"head ranges {outside} are not within {layout.kv_heads} kv heads")
    held = {head for start, stop in layout.head_ranges for head in range(max(start, 0), min(stop, layout.kv_heads))}
    if len(held) != layout.kv_heads:
        found.append(f"{layout.tensor_parallel} ranks hold {len(held)} of {layout.kv_heads} kv heads")
    return found
