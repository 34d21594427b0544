"""What a worker's KV pool looks like: shared by the engine, which allocates it, and the transfer, which converts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One worker's KV pool. Per rank the tensor is [layer][k|v][block][kv_head][token in block][row].

    A row is head_dim values, or as many codes and their float32 scale.
    """

    fingerprint: str  # of the model: weights, vocabulary and every setting that changes the meaning of KV
    layers: int
    kv_heads: int  # of the whole model
    head_dim: int
    rope: str  # readable rope settings, e.g. "default theta=100000.0"
    dtype: str  # float32 | bfloat16 | float16 | int8 | fp8
    block_size: int  # tokens
    head_ranges: tuple[tuple[int, int], ...]  # per rank: kv heads [start, stop); ranges may overlap (replication)

    @property
    def tensor_parallel(self) -> int:
        """Ranks of the worker."""
        return len(self.head_ranges)

    def pack(self) -> bytes:
        """As msgpack, for tickets and handshakes."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return bytes(msgpack.packb(fields))

    @staticmethod
    def unpack(data: bytes) -> KVLayout:
        """The inverse of `pack`. Raises ValueError for anything else."""
        fields: dict[str, Any] = msgpack.unpackb(data)
        try:
            ranges = tuple((int(start), int(stop)) for start, stop in fields.pop("head_ranges"))
            return KVLayout(**fields, head_ranges=ranges)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a KV layout: {error}") from error


def block_count(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)
