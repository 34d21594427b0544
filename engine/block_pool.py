"""Who holds which block of a rank's KV pool, and which blocks hold a known prefix: pure bookkeeping, no tensors.

A block is in exactly one of three states:

- free: nobody refers to it and it holds nothing of use;
- used: at least one sequence refers to it (a sequence that shares it counts as one more);
- evictable: nobody refers to it, but it holds a prefix that a later prompt may match. Oldest first, it is given away
  when there are no free blocks.

A full block whose KV is complete is published under the digest of its salt and of all tokens up to its end, so equal
digests mean equal contents. At most one block is found under a digest; a second one with the same contents stays
private to its sequences. Giving a block away always takes its digest with it. Every operation is O(1) per block.

All ranks of a worker use the same block numbers; the leader alone keeps this pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

from ..proto.block_digests import block_digests
from ..proto.errors import Exhausted


class OutOfBlocks(Exhausted):
    """Fewer blocks are free or evictable than were asked for; nothing was allocated."""


class PrefixListener(Protocol):
    """Who is told which prefixes can be found; called in the midst of the pool's operations."""

    def added(self, digest: bytes) -> None:
        """A block is found under this digest from now on."""
        ...

    def removed(self, digest: bytes) -> None:
        """No block is found under this digest any more."""
        ...


class BlockPool:
    """The blocks 0 .. blocks - 1, of `block_size` tokens each. Not thread-safe: the engine thread owns it."""

    def __init__(self, blocks: int, block_size: int, prefix_cache: bool) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {blocks} blocks of {block_size} tokens")
        self.block_size = block_size
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._prefix_cache = prefix_cache
        self._references = [0] * blocks
        self._digests: list[bytes | None] = [None] * blocks  # of published blocks, found under it or not
        self._index: dict[bytes, int] = {}  # digest -> the block that is found under it
        self._free = list(range(blocks - 1, -1, -1))  # a stack: low numbers first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.listener: PrefixListener | None = None

    @property
    def total(self) -> int:
        """All blocks."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that can be allocated now: free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Blocks that somebody refers to."""
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Evictable blocks: they hold a prefix and nobody refers to them."""
        return len(self._evictable)

    @property
    def prefixes(self) -> Collection[bytes]:
        """The digests under which blocks are found now (`proto.block_digests`)."""
        return self._index.keys()

    def references(self, block: int) -> int:
        """How many sequences refer to the block; above 1 it must be copied before it is written."""
        return self._references[block]

    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The longest chain of cached full blocks that begins `tokens`. Pin them before anything else is allocated.

        Only whole blocks are found, so `len(result) * block_size <= len(tokens)`. To keep the last token to compute
        (for its logits), ask for all but the last. Counts nothing: see `record_lookup`.
        """
        found: list[int] = []
        if self._index:
            for digest in block_digests(tokens, salt, self.block_size):
                block = self._index.get(digest)
                if block is None:
                    break
                found.append(block)
        return found

    def free_after_pin(self, blocks: Sequence[int]) -> int:
        """Blocks that could still be allocated after `pin(blocks)`."""
        return self.free - sum(1 for block in set(blocks) if not self._references[block])

    def record_lookup(self, query_tokens: int, hit_tokens: int) -> None:
        """Count one admitted prompt: tokens looked up, and tokens whose KV was found."""
        self.prefix_query_tokens += query_tokens
        self.prefix_hit_tokens += hit_tokens

    def pin(self, blocks: Sequence[int]) -> None:
        """Refer to blocks that are cached or used already, once more each. Raises ValueError, changing nothing."""
        for block in blocks:
            if not self._references[block] and block not in self._evictable:
                raise ValueError(f"block {block} is free: it holds nothing to refer to")
        for block in blocks:
            if not self._references[block]:
                self._evictable.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with undefined contents, one reference each. All or nothing: raises OutOfBlocks."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self.free:
            raise OutOfBlocks(f"{count} KV blocks wanted, {self.free} of {self.total} free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; give them in sequence order, so that the end of a prefix goes first.

        Raises ValueError, changing nothing, when a block has fewer references than that.
        """
        for block, times in Counter(blocks).items():
            if self._references[block] < times:
                raise ValueError(f"block {block} is released more often than it was taken")
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._retire(block)

    def publish(self, blocks: Sequence[int], tokens: Sequence[int], salt: str) -> None:
        """Let later prompts find the full blocks among `blocks`, which hold the KV of `tokens` from position 0.

        `tokens` are only those whose KV is in the pool. Blocks published before are not hashed again. Contents that
        are cached in another block already stay found there. Raises ValueError for a block that nobody refers to.
        """
        full = min(len(tokens) // self.block_size, len(blocks))
        if not self._prefix_cache or not full:
            return
        start = full
        while start and self._digests[blocks[start - 1]] is None:
            start -= 1
        for block in blocks[start:full]:
            if not self._references[block]:
                raise ValueError(f"block {block} is free: it holds nothing to publish")
        parent = (self._digests[blocks[start - 1]] if start else None) or b""
        chain = block_digests(tokens[: full * self.block_size], salt, self.block_size, start, parent)
        for block, digest in zip(blocks[start:full], chain, strict=True):
            self._digests[block] = digest
            if digest not in self._index:
                self._index[digest] = block
                if self.listener is not None:
                    self.listener.added(digest)

    def check(self) -> None:
        """Raise AssertionError where the states contradict each other (tests call this after every operation)."""
        problems: list[str] = []
        free, evictable = set(self._free), set(self._evictable)
        for block, references in enumerate(self._references):
            states = (block in free) + (block in evictable) + (references > 0)
            if states != 1 or references < 0:
                problems.append(f"block {block} is in {states} states with {references} references")
            digest = self._digests[block]
            if block in free and digest is not None:
                problems.append(f"free block {block} keeps a digest")
            if block in evictable and (digest is None or self._index.get(digest) != block):
                problems.append(f"evictable block {block} cannot be found")
        problems += [
            f"the index leads to block {block}, which holds something else"
            for digest, block in self._index.items()
            if self._digests[block] != digest
        ]
        if len(free) != len(self._free):
            problems.append("a block is free twice")
        if problems:
            raise AssertionError("; ".join(problems))

    def _retire(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None and self._index.get(digest) == block:
            self._evictable[block] = None
        else:
            self._digests[block] = None
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        digest = self._digests[block]
        if digest is not None:
            del self._index[digest]
            if self.listener is not None:
                self.listener.removed(digest)
        self._digests[block] = None
        return block
