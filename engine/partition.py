"""Who computes what among the ranks of one worker: pure arithmetic on heads, MLP columns and vocabulary rows."""

from __future__ import annotations

from ..proto.errors import ConfigError

Range = tuple[int, int]


def head_ranges(kv_heads: int, ranks: int) -> tuple[Range, ...]:
    """KV heads [start, stop) of each rank: whole heads, uneven where they do not divide, the first ranks larger.

    With more ranks than heads each rank has one head, and a head is replicated on several neighbouring ranks.
    """
    if ranks <= kv_heads:
        return _even(kv_heads, ranks)
    return tuple((rank * kv_heads // ranks, rank * kv_heads // ranks + 1) for rank in range(ranks))


def query_ranges(heads: int, kv_heads: int, ranks: int) -> tuple[Range, ...]:
    """Query heads [start, stop) of each rank: those of its KV heads, or its share of them where these are replicated.

    Raises ConfigError when a rank would have none.
    """
    group = heads // kv_heads
    owned = head_ranges(kv_heads, ranks)
    if ranks <= kv_heads:
        return tuple((start * group, stop * group) for start, stop in owned)
    ranges: list[Range] = []
    for head in range(kv_heads):
        sharing = sum(1 for start, _ in owned if start == head)
        if sharing > group:
            raise ConfigError(
                f"tensor_parallel {ranks} exceeds what {heads} query heads on {kv_heads} KV heads allow ({heads})"
            )
        ranges += [(head * group + start, head * group + stop) for start, stop in _even(group, sharing)]
    return tuple(ranges)


def split(total: int, ranks: int) -> tuple[Range, ...]:
    """[start, stop) of each rank over MLP columns or vocabulary rows, in multiples of 64 where `total` allows it.

    Raises ConfigError when there are fewer than the ranks.
    """
    if ranks > total:
        raise ConfigError(f"tensor_parallel {ranks} cannot split a dimension of {total}")
    step = 64
    while total // step < ranks * 4 and step > 1:
        step //= 2
    whole = _even(total // step, ranks)
    ranges = [(start * step, stop * step) for start, stop in whole]
    ranges[-1] = (ranges[-1][0], total)
    return tuple(ranges)


def _even(total: int, parts: int) -> tuple[Range, ...]:
    base, extra = divmod(total, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return tuple((starts[part], starts[part + 1]) for part in range(parts))
