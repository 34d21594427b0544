"""The tensors of one step on a GPU, built on the host and brought there by one copy; and the sizes of captured steps.

A step in which every token has a row of logits (decode, with or without proposals) runs *by rows*: each token is a
sequence of its own whose context ends with it, so that a draw behind proposals has the bits of a draw without them.
Such steps are padded to a few sizes, each captured once as a graph.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..proto.kv_layout import block_count
from .device_edge import Edge, packed_bytes, upload, views
from .device_model import DeviceBatch
from .step import SequenceStep

MOST_ROWS = 256  # of a captured step; larger ones are launched kernel by kernel, which costs them little
_LEAST_CONTEXT = 1024
_CONTEXT_STEP = 4  # programs behind a context's end do nothing, but they are launched


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a captured step: at most so many rows, over contexts of at most so many tokens."""

    rows: int
    longest: int


def by_rows(steps: Sequence[SequenceStep]) -> bool:
    """Whether every token of the step is drawn behind."""
    return all(step.scores is None and step.draw_rows == len(step.tokens) for step in steps)


def bucket_of(steps: Sequence[SequenceStep], longest: int) -> Bucket | None:
    """The bucket of a step by rows in a model with contexts of up to `longest`; None where it has too many rows."""
    rows = sum(len(step.tokens) for step in steps)
    if rows > MOST_ROWS:
        return None
    return Bucket(
        next(size for size in row_sizes() if size >= rows),
        next(size for size in context_sizes(longest) if size >= max(step.end for step in steps)),
    )


@cache
def row_sizes() -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, ..."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < MOST_ROWS:
        sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 2)))
    return tuple(sizes)


@cache
def context_sizes(longest: int) -> tuple[int, ...]:
    """1k, 4k, 16k, ... up to the longest context."""
    sizes = [min(_LEAST_CONTEXT, longest)]
    while sizes[-1] < longest:
        sizes.append(min(sizes[-1] * _CONTEXT_STEP, longest))
    return tuple(sizes)


class BucketInputs:
    """Where a captured step reads its inputs: always the same memory of the device."""

    def __init__(self, edge: Edge, bucket: Bucket, block_size: int) -> None:
        self._edge = edge
        self._bucket, self._block_size = bucket, block_size
        parts = _row_parts((), bucket, block_size)
        self._memory = torch.zeros(packed_bytes([part.nbytes for part in parts]), dtype=torch.uint8, device=edge.device)
        upload(edge, parts, self._memory)
        self.batch = _batch(views(self._memory, parts), bucket.longest)

    def load(self, steps: Sequence[SequenceStep]) -> None:
        """Queue the copy of a step's inputs. Raises ValueError for too few blocks."""
        upload(self._edge, _row_parts(steps, self._bucket, self._block_size), self._memory)


def row_batch(edge: Edge, steps: Sequence[SequenceStep], block_size: int) -> DeviceBatch:
    """A step by rows that is not captured."""
    longest = max(step.end for step in steps)
    bucket = Bucket(sum(len(step.tokens) for step in steps), longest)
    return _batch(upload(edge, _row_parts(steps, bucket, block_size)), longest)


def varlen_batch(edge: Edge, steps: Sequence[SequenceStep], block_size: int) -> DeviceBatch:
    """Any step: sequences end to end. Raises ValueError for too few blocks."""
    flat, shape = _flat_parts(steps, block_size)
    up = upload(edge, [*flat, *shape])
    return _batch(up[:5], max(step.end for step in steps), up[5], up[6])


class PieceInputs:
    """Where the pieces of a captured step of `size` tokens read theirs: always the same memory of the device."""

    def __init__(self, edge: Edge, size: int, block_size: int) -> None:
        self._edge, self._size, self._block_size = edge, size, block_size
        parts = _padded([torch.empty(0, dtype=torch.int64)] * 3, size)
        self._memory = torch.zeros(packed_bytes([part.nbytes for part in parts]), dtype=torch.uint8, device=edge.device)
        upload(edge, parts, self._memory)
        self.token_ids, self.positions, self.slots = views(self._memory, parts)

    def load(self, steps: Sequence[SequenceStep]) -> DeviceBatch:
        """Queue the copies of a step's inputs; the step without its padding. Raises ValueError for too few blocks."""
        flat, shape = _flat_parts(steps, self._block_size)
        upload(self._edge, _padded(flat, self._size), self._memory)
        contexts, tables, offsets, rows = upload(self._edge, shape)
        own = [part[: len(flat[0])] for part in (self.token_ids, self.positions, self.slots)]
        return _batch([*own, contexts, tables], max(step.end for step in steps), offsets, rows)


def _padded(flat: Sequence[Tensor], size: int) -> list[Tensor]:
    """Token ids, positions and slots of `size` tokens; slot -1: it writes nothing."""
    return [F.pad(part, (0, size - len(part)), value=fill) for part, fill in zip(flat, (0, 0, -1), strict=True)]


def _flat_parts(steps: Sequence[SequenceStep], block_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of any step: (token ids, positions, slots), and (contexts, tables, offsets, rows of logits)."""
    tokens, positions, slots, offsets, rows = array("q"), array("q"), array("q"), [0], array("q")
    width = max(block_count(step.end, block_size) for step in steps)
    tables = np.zeros((len(steps), width), dtype=np.int32)
    for index, step in enumerate(steps):
        blocks = _blocks(step, block_size)
        _put(tables[index], blocks[: block_count(step.end, block_size)])
        tokens.extend(step.tokens)
        positions.extend(range(step.start, step.end))
        slots.extend(blocks[at // block_size] * block_size + at % block_size for at in range(step.start, step.end))
        rows.extend(offsets[-1] + row for row in step.logit_rows)
        offsets.append(len(tokens))
    contexts = torch.tensor([step.end for step in steps], dtype=torch.int32)
    longs = [torch.tensor(part, dtype=torch.int64) for part in (tokens, positions, slots, rows)]
    shape = [contexts, torch.from_numpy(tables), torch.tensor(offsets, dtype=torch.int32), longs[3]]
    return longs[:3], shape


def _batch(
    parts: Sequence[Tensor], longest: int, offsets: Tensor | None = None, logit_rows: Tensor | None = None
) -> DeviceBatch:
    token_ids, positions, slots, contexts, tables = parts
    return DeviceBatch(token_ids, positions, slots, contexts, tables, longest, offsets, logit_rows)


def _row_parts(steps: Sequence[SequenceStep], bucket: Bucket, block_size: int) -> list[Tensor]:
    """Token ids, positions, slots, contexts and tables for a bucket, padding included."""
    tokens, positions = np.zeros(bucket.rows, dtype=np.int64), np.zeros(bucket.rows, dtype=np.int64)
    slots, contexts = np.full(bucket.rows, -1, dtype=np.int64), np.zeros(bucket.rows, dtype=np.int32)
    tables = np.zeros((bucket.rows, block_count(bucket.longest, block_size)), dtype=np.int32)
    row = 0
    for step in steps:
        blocks = _blocks(step, block_size)
        first, used = row, blocks[: block_count(step.end, block_size)]
        for token, at in zip(step.tokens, range(step.start, step.end), strict=True):
            tokens[row], positions[row], contexts[row] = token, at, at + 1
            slots[row] = blocks[at // block_size] * block_size + at % block_size
            row += 1
        _put(tables[first], used)
        tables[first + 1 : row] = tables[first]
    return [torch.from_numpy(part) for part in (tokens, positions, slots, contexts, tables)]


def _blocks(step: SequenceStep, block_size: int) -> Sequence[int]:
    if not step.tokens or len(step.blocks) * block_size < step.end:
        raise ValueError(
            f"{step.request_id}: {len(step.tokens)} tokens from {step.start} in {len(step.blocks)} blocks "
            f"of {block_size}"
        )
    return step.blocks


def _put(row: np.ndarray, blocks: Sequence[int]) -> None:
    row[: len(blocks)] = np.frombuffer(array("i", blocks), dtype=np.int32)
