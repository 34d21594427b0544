"""What a full KV block is known by: the digest of its salt and of all tokens up to its end.

Each block's digest is chained to the one before it, so equal digests mean equal prefixes. Workers find cached blocks
by the whole digest; routers, for whom a false match costs a detour and no correctness, know blocks by `short_digest`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

_DIGEST_BYTES = 16
_SHORT_BYTES = 8
_TOKEN_BYTES = 8


def block_digests(
    tokens: Sequence[int], salt: str, block_size: int, start: int = 0, parent: bytes = b""
) -> Iterator[bytes]:
    """Digests of the full blocks of `tokens` from block `start` on; `parent` is the digest of the block before it."""
    key = hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
    data = memoryview(array("q", tokens[start * block_size :])).cast("B")
    step = block_size * _TOKEN_BYTES
    for low in range(0, len(data) - step + 1, step):
        hasher = hashlib.blake2b(parent, digest_size=_DIGEST_BYTES, key=key)
        hasher.update(data[low : low + step])
        parent = hasher.digest()
        yield parent


def short_digest(digest: bytes) -> int:
    """The digest as routers know it: 64 bits."""
    return int.from_bytes(digest[:_SHORT_BYTES], "little")
