"""The block pool: counts, prefix matching, eviction, and its invariants under random operations."""

from __future__ import annotations

import pytest
from baton.engine.block_pool import BlockPool, OutOfBlocks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def tokens_of(blocks: int, first: int = 0, size: int = 4) -> list[int]:
    return list(range(first, first + blocks * size))


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 4, True)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks wanted, 1 of 4 free"):
        pool.allocate(2)
    assert (pool.total, pool.used, pool.free, pool.cached) == (4, 3, 1, 0)


def test_a_released_prefix_is_found_and_only_whole_blocks_of_it() -> None:
    pool = BlockPool(8, 4, True)
    blocks = pool.allocate(3)
    pool.publish(blocks, tokens_of(3)[:11], "")
    pool.release(blocks)
    assert (pool.used, pool.free, pool.cached) == (0, 8, 2)
    assert pool.match(tokens_of(3), "") == blocks[:2]
    assert pool.match(tokens_of(3)[:7], "") == blocks[:1]
    assert pool.match(tokens_of(3)[:3], "") == []


def test_a_block_is_found_only_after_the_same_parents_and_salt() -> None:
    pool = BlockPool(8, 4, True)
    blocks = pool.allocate(2)
    pool.publish(blocks, tokens_of(2), "tenant")
    assert pool.match(tokens_of(2), "") == []
    assert pool.match(tokens_of(1, first=4), "tenant") == []
    assert pool.match([9, 9, 9, 9, *tokens_of(1, first=4)], "tenant") == []
    assert pool.match(tokens_of(2), "tenant") == blocks


def test_publishing_equal_contents_keeps_the_first_block() -> None:
    pool = BlockPool(8, 4, True)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.publish(first, tokens_of(2), "")
    pool.publish(second, tokens_of(3), "")
    assert pool.match(tokens_of(3), "") == [*first, second[2]]
    pool.release(second)
    assert pool.cached == 1
    pool.check()


def test_publishing_again_goes_on_from_what_is_published() -> None:
    pool = BlockPool(8, 4, True)
    blocks = pool.allocate(3)
    for length in range(13):
        pool.publish(blocks, tokens_of(3)[:length], "")
        assert pool.match(tokens_of(3), "") == blocks[: length // 4]


def test_the_oldest_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4, 4, True)
    old = pool.allocate(2)
    pool.publish(old, tokens_of(2), "")
    new = pool.allocate(2)
    pool.publish(new, tokens_of(2, first=100), "")
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.match(tokens_of(2), "") == old[:1]
    assert pool.match(tokens_of(2, first=100), "") == new


def test_a_pinned_prefix_is_not_evicted() -> None:
    pool = BlockPool(3, 4, True)
    blocks = pool.allocate(2)
    pool.publish(blocks, tokens_of(2), "")
    pool.release(blocks)
    found = pool.match(tokens_of(2), "")
    assert pool.free_after_pin(found) == 1
    pool.pin(found)
    assert pool.free == 1
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    pool.pin(found)
    assert pool.references(found[0]) == 2


def test_illegal_calls_change_nothing() -> None:
    pool = BlockPool(4, 4, True)
    blocks = pool.allocate(2)
    before = (pool.used, pool.free, pool.cached)
    for illegal in (
        lambda: pool.pin([blocks[0], 3]),
        lambda: pool.release([*blocks, 3]),
        lambda: pool.release([blocks[0], blocks[0]]),
        lambda: pool.publish([blocks[0], 3], tokens_of(2), ""),
        lambda: pool.allocate(-1),
    ):
        with pytest.raises(ValueError):
            illegal()
        assert (pool.used, pool.free, pool.cached) == before
        assert [pool.references(block) for block in range(4)].count(1) == 2
        pool.check()


def test_without_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(4, 4, False)
    blocks = pool.allocate(2)
    pool.publish(blocks, tokens_of(2), "")
    pool.release(blocks)
    assert pool.match(tokens_of(2), "") == []
    assert pool.cached == 0


def test_kv_13_a_recycled_block_forgets_its_prefix() -> None:
    pool = BlockPool(8, 4, True)
    for first in (0, 1000, 2000):
        blocks = pool.allocate(8)
        pool.publish(blocks, tokens_of(8, first), "")
        pool.release(blocks)
        pool.check()
    assert pool.match(tokens_of(8), "") == []
    assert pool.match(tokens_of(8, 2000), "") == blocks


def test_lookups_are_counted_when_told() -> None:
    pool = BlockPool(4, 4, True)
    pool.record_lookup(10, 4)
    pool.record_lookup(5, 0)
    assert (pool.prefix_query_tokens, pool.prefix_hit_tokens) == (15, 4)


class PoolModel(RuleBasedStateMachine):
    """Sequences come, share, grow and go; a dictionary knows what every block holds (KV-13)."""

    SIZE = 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, self.SIZE, True)
        self.holds: dict[int, tuple[str, tuple[int, ...]]] = {}  # block -> salt and all tokens up to its end
        self.live: list[tuple[list[int], list[int], str]] = []  # blocks, tokens, salt

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from(["", "x"]))
    def admit(self, tokens: list[int], salt: str) -> None:
        found = self.pool.match(tokens, salt)
        for index, block in enumerate(found):
            assert self.holds[block] == (salt, tuple(tokens[: (index + 1) * self.SIZE]))
        needed = -(-len(tokens) // self.SIZE) - len(found)
        fits = needed <= self.pool.free_after_pin(found)
        self.pool.pin(found)
        if not fits:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(needed)
            self.pool.release(found)
            return
        blocks = found + self.pool.allocate(needed)
        self.live.append((blocks, tokens, salt))
        for index in range(len(found), len(tokens) // self.SIZE):
            self.holds[blocks[index]] = (salt, tuple(tokens[: (index + 1) * self.SIZE]))
        for index in range(len(tokens) // self.SIZE, len(blocks)):
            self.holds.pop(blocks[index], None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks, tokens, salt = data.draw(st.sampled_from(self.live))
        self.pool.publish(blocks, tokens[: data.draw(st.integers(0, len(tokens)))], salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks, tokens, salt = data.draw(st.sampled_from(self.live))
        self.pool.pin(blocks)
        self.live.append((list(blocks), tokens, salt))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.pool.release(self.live.pop(index)[0])

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        used = {block for blocks, _, _ in self.live for block in blocks}
        assert self.pool.used == len(used)
        for block in used:
            assert self.pool.references(block) == sum(blocks.count(block) for blocks, _, _ in self.live)


PoolModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestBlockPool = PoolModel.TestCase
