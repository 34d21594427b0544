"""A block pool for requests of which only the lengths are known: no prefix can be found, so blocks need no names.

As the pool of a worker without a prefix cache, but that every block is called 0: what is free after each operation is
the same, and so is every decision that is made of it (`tests/test_simulator_exact.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.block_pool import BlockPool, OutOfBlocks


class CountedPool(BlockPool):
    """Blocks by number alone. A block must not be shared: `pin` takes none."""

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(1, block_size, False)
        self._total = self._left = blocks

    @property
    def total(self) -> int:
        """All blocks."""
        return self._total

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return self._left

    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Nothing is ever found."""
        return []

    def free_after_pin(self, blocks: Sequence[int]) -> int:
        """All that are free."""
        return self._left

    def pin(self, blocks: Sequence[int]) -> None:
        """Raises ValueError for any block."""
        if blocks:
            raise ValueError("blocks without names cannot be shared")

    def allocate(self, count: int) -> list[int]:
        """All or nothing: raises OutOfBlocks."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self._left:
            raise OutOfBlocks(f"{count} KV blocks wanted, {self._left} of {self._total} free")
        self._left -= count
        return [0] * count

    def release(self, blocks: Sequence[int]) -> None:
        """Raises ValueError when more come back than were taken."""
        if self._left + len(blocks) > self._total:
            raise ValueError("more blocks are released than were taken")
        self._left += len(blocks)

    def publish(self, blocks: Sequence[int], tokens: Sequence[int], salt: str) -> None:
        """Nobody could find them."""
