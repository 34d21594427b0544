"""What a router believes of its workers' prefix caches: told by feeds over real pools, or guessed."""

from __future__ import annotations

import random

from baton.engine.block_pool import BlockPool, OutOfBlocks
from baton.engine.prefix_feed import PrefixFeed
from baton.proto import worker_pb2 as pb
from baton.proto.block_digests import short_digest
from baton.router.life_messages import Peer
from baton.router.prefix_index import Prefix, PrefixIndex
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

A, B = Peer("w-0", "1"), Peer("w-1", "1")
SIZE, ROUTER, OTHER = 4, 1, 2


def welcome(blocks: int = 8) -> pb.Welcome:
    return pb.Welcome(block_size=SIZE, total_blocks=blocks)


def prefix(tokens: list[int], salt: str = "") -> Prefix:
    return Prefix([*tokens, 9], salt)  # the last token is never looked up


def fill(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    blocks = pool.allocate(len(tokens) // SIZE)
    pool.publish(blocks, tokens, salt)
    return blocks


def told(feed: PrefixFeed, session: int = ROUTER) -> list[pb.PrefixChanges]:
    return [event.prefixes for to, event in feed.take() if to == session]


def test_a_watcher_hears_everything_then_what_changes() -> None:
    pool = BlockPool(8, SIZE, True)
    fill(pool, list(range(8)))
    feed, index = PrefixFeed(pool), PrefixIndex(told=True)
    index.worker_up(A, welcome())
    assert feed.take() == []
    feed.watch(ROUTER)
    (everything,) = told(feed)
    assert everything.snapshot
    assert index.changed(A, everything)
    assert index.cached(A, prefix(list(range(8)))) == 8
    assert index.cached(A, prefix([*range(4), 7, 7, 7, 7])) == 4
    assert index.cached(A, prefix(list(range(8)), "tenant")) == 0
    assert index.cached(B, prefix(list(range(8)))) == 0
    fill(pool, list(range(12)))
    (more,) = told(feed)
    assert (more.snapshot, more.sequence, len(more.added)) == (False, everything.sequence + 1, 1)
    assert index.changed(A, more)
    assert index.cached(A, prefix(list(range(12)))) == 12
    assert told(feed) == []


def test_the_last_token_is_no_part_of_what_is_looked_up() -> None:
    index = PrefixIndex(told=False)
    index.worker_up(A, welcome())
    index.sent(A, prefix(list(range(8))))
    assert index.cached(A, Prefix(list(range(8)), "")) == 4
    assert index.cached(A, Prefix(list(range(9)), "")) == 8


def test_what_came_and_went_between_two_messages_is_not_mentioned() -> None:
    pool = BlockPool(2, SIZE, True)
    feed = PrefixFeed(pool)
    feed.watch(ROUTER)
    told(feed)
    pool.release(fill(pool, list(range(4))))
    pool.release(pool.allocate(2))
    assert told(feed) == []


def test_more_changes_than_blocks_become_a_snapshot() -> None:
    pool = BlockPool(2, SIZE, True)
    feed = PrefixFeed(pool)
    feed.watch(ROUTER)
    for first in range(3):
        pool.release(fill(pool, [first] * 8))
        if not first:
            told(feed)  # both blocks are known
    (message,) = told(feed)
    assert message.snapshot
    assert len(message.added) == 2


def test_after_a_gap_nothing_is_believed_until_a_snapshot() -> None:
    index = PrefixIndex(told=True)
    index.worker_up(A, welcome())
    assert index.changed(A, pb.PrefixChanges(sequence=7, added=[1]))  # the snapshot has been asked for
    assert index.blocks(A) == 0
    assert index.changed(A, pb.PrefixChanges(sequence=7, snapshot=True, added=[1, 2]))
    assert not index.changed(A, pb.PrefixChanges(sequence=9, added=[3]))  # ask, once
    assert index.changed(A, pb.PrefixChanges(sequence=10, added=[4]))
    assert index.blocks(A) == 2
    assert index.changed(A, pb.PrefixChanges(sequence=10, snapshot=True, added=[5]))
    assert index.changed(A, pb.PrefixChanges(sequence=11, added=[6], removed=[5]))
    assert index.blocks(A) == 1


def test_a_worker_that_was_lost_is_forgotten() -> None:
    index = PrefixIndex(told=True)
    index.worker_up(A, welcome())
    index.changed(A, pb.PrefixChanges(sequence=0, snapshot=True, added=[1]))
    index.worker_lost(A)
    assert index.blocks(A) == 0
    assert index.changed(A, pb.PrefixChanges(sequence=1, added=[2]))  # late news: nobody is asked


def test_a_pool_nobody_watches_keeps_no_changes() -> None:
    pool = BlockPool(4, SIZE, True)
    feed = PrefixFeed(pool)
    feed.watch(ROUTER)
    feed.watch(OTHER)
    listeners = [pool.listener]
    for session in (ROUTER, OTHER, OTHER):
        feed.forget(session)
        listeners.append(pool.listener)
    assert listeners == [feed, feed, None, None]


def test_a_guess_is_what_a_cache_of_that_size_would_keep() -> None:
    index = PrefixIndex(told=False)
    index.worker_up(A, welcome(blocks=3))
    old, new = list(range(8)), list(range(100, 108))
    index.sent(A, prefix(old))
    assert index.cached(A, prefix(old)) == 8
    index.sent(A, prefix(new))
    assert index.cached(A, prefix(new)) == 8
    assert index.cached(A, prefix(old)) == 4  # its end went first
    assert index.changed(A, pb.PrefixChanges(sequence=5, snapshot=True))
    assert index.cached(A, prefix(new)) == 8


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=30), st.integers(1, 6))
def test_a_guess_never_exceeds_the_pool_and_the_latest_prefix_is_kept(sent: list[tuple[int, int]], room: int) -> None:
    index = PrefixIndex(told=False)
    index.worker_up(A, welcome(room))
    for first, blocks in sent:
        tokens = [first] * (blocks * SIZE)
        index.sent(A, prefix(tokens))
        assert index.blocks(A) <= room
        assert index.cached(A, prefix(tokens)) == min(blocks, room) * SIZE


class FeedModel(RuleBasedStateMachine):
    """A real pool under random work, and a router that may miss messages: in the end it knows exactly what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.index = BlockPool(6, SIZE, True), PrefixIndex(told=True)
        self.feed = PrefixFeed(self.pool)
        self.feed.watch(ROUTER)
        self.index.worker_up(A, welcome(6))
        self.live: list[list[int]] = []
        self.settled = 1  # settling prompts are of larger ids than the others

    @rule(seed=st.integers(0, 3), blocks=st.integers(1, 4))
    def admit(self, seed: int, blocks: int) -> None:
        rng = random.Random(seed)
        tokens = [rng.randrange(2) for _ in range(blocks * SIZE)]
        found = self.pool.match(tokens, "")
        self.pool.pin(found)
        try:
            table = found + self.pool.allocate(blocks - len(found))
        except OutOfBlocks:
            self.pool.release(found)
            return
        self.pool.publish(table, tokens, "")
        self.live.append(table)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 9))
    def release(self, at: int) -> None:
        self.pool.release(self.live.pop(at % len(self.live)))

    @rule(lost=st.booleans())
    def flush(self, lost: bool) -> None:
        for changes in told(self.feed):
            arrives = changes.snapshot or not lost  # a session drops no snapshot
            if arrives and not self.index.changed(A, changes):
                self.feed.watch(ROUTER)

    @rule()
    def settle(self) -> None:
        """Whatever was lost before, the next change shows it, and the snapshot repairs it."""
        while self.live:
            self.pool.release(self.live.pop())
        self.settled += 1
        self.pool.release(fill(self.pool, [self.settled] * SIZE))
        self.flush(lost=False)
        self.flush(lost=False)
        _, known = self.index._workers[A]
        assert len(known) == len(self.pool.prefixes)
        assert all(short_digest(digest) in known for digest in self.pool.prefixes)

    @invariant()
    def bounded(self) -> None:
        assert len(self.feed._changes) <= self.pool.total


FeedModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestFeed = FeedModel.TestCase
