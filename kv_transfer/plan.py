"""Which bytes go where (pure): heads from prefill ranks to decode ranks, and the boxes that queued KV is cut into.

Both sides compute `shares` from the two layouts, so nothing about it is negotiated. A head that several prefill ranks
hold is sent by one of them; a head that several decode ranks hold is sent once to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Range = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular piece of a leg's KV; heads are the model's own numbers."""

    tokens: Range
    layers: Range
    heads: Range

    @property
    def volume(self) -> int:
        """How many (token, layer, head) cells."""
        (a, b), (c, d), (e, f) = self.tokens, self.layers, self.heads
        return (b - a) * (d - c) * (f - e)

    def overlaps(self, other: Box) -> bool:
        """Whether the two share a cell."""
        return _meet(self.tokens, other.tokens) and _meet(self.layers, other.layers) and _meet(self.heads, other.heads)


def length(span: Range) -> int:
    """Elements of a half-open range."""
    return span[1] - span[0]


def _meet(one: Range, two: Range) -> bool:
    return max(one[0], two[0]) < min(one[1], two[1])


def shares(
    prefill: Sequence[Range], decode: Sequence[Range], kv_heads: int
) -> dict[tuple[int, int], tuple[Range, ...]]:
    """The heads that each (prefill rank, decode rank) moves; pairs that move nothing are absent.

    `prefill` and `decode` are the ranks' head ranges. Where several prefill ranks hold a head, decode ranks are spread
    over them. Raises ValueError when the ranks of one side do not hold all `kv_heads`.
    """
    holders = [[rank for rank, span in enumerate(prefill) if span[0] <= head < span[1]] for head in range(kv_heads)]
    missing = [head for head, ranks in enumerate(holders) if not ranks]
    missing += [head for head in range(kv_heads) if not any(span[0] <= head < span[1] for span in decode)]
    if missing:
        raise ValueError(f"no rank holds kv heads {sorted(set(missing))}")
    moved: dict[tuple[int, int], list[Range]] = {}
    for target, (start, stop) in enumerate(decode):
        if not 0 <= start < stop <= kv_heads:
            raise ValueError(f"decode rank {target} has kv heads [{start}, {stop}) of {kv_heads}")
        for head in range(start, stop):
            source = holders[head][target % len(holders[head])]
            ranges = moved.setdefault((source, target), [])
            if ranges and ranges[-1][1] == head:
                ranges[-1] = (ranges[-1][0], head + 1)
            else:
                ranges.append((head, head + 1))
    return {pair: tuple(ranges) for pair, ranges in moved.items()}


def joined(one: Box, two: Box) -> Box | None:
    """Both as one box where `two` continues `one` in layers or tokens, else None."""
    if one.heads != two.heads:
        return None
    if one.tokens == two.tokens and one.layers[1] == two.layers[0]:
        return Box(one.tokens, (one.layers[0], two.layers[1]), one.heads)
    if one.layers == two.layers and one.tokens[1] == two.tokens[0]:
        return Box((one.tokens[0], two.tokens[1]), one.layers, one.heads)
    return None


def pieces(box: Box, cell_bytes: int, target_bytes: int) -> list[Box]:
    """Cut a box into frames of about `target_bytes` (never more than 5/4 of it, but one token of one layer) or less.

    Whole layers stay together where a layer is no larger than the target; otherwise frames begin at round numbers of
    tokens, where blocks probably begin. `cell_bytes` is the size of one (token, layer, head): 2 * head_dim * itemsize.
    """
    token_bytes = length(box.heads) * cell_bytes
    layer_bytes = length(box.tokens) * token_bytes
    if layer_bytes <= target_bytes:
        count = -(-length(box.layers) // (target_bytes // layer_bytes))
        return [Box(box.tokens, layers, box.heads) for layers in split(box.layers, count)]
    spans = _rounded(box.tokens, max(1, target_bytes // token_bytes))
    return [Box(tokens, (layer, layer + 1), box.heads) for layer in range(*box.layers) for tokens in spans]


def _rounded(span: Range, most: int) -> list[Range]:
    """Ranges of nearly equal length, `most` or at most a quarter more, that end at multiples of a power of two."""
    grain = 1 << (max(1, most // 4).bit_length() - 1)
    edges = [stop // grain * grain for _, stop in split(span, -(-length(span) // most))]
    edges = [span[0], *(edge for edge in edges[:-1] if edge > span[0]), span[1]]
    return list(pairwise(edges))


def split(span: Range, count: int) -> list[Range]:
    """At most `count` non-empty ranges of nearly equal length that make up `span`."""
    total = length(span)
    count = min(count, total)
    edges = [span[0] + total * index // count for index in range(count + 1)] if count else []
    return list(pairwise(edges))
