"""Which prefixes each worker holds, as far as this router knows: by what the workers say, or by what it sent them.

Blocks are known by short digests (`proto.block_digests`), some tens of bytes each. A wrong belief costs a prefill that
could have been shorter, never a wrong token: the worker looks for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ..proto import worker_pb2 as pb
from ..proto.block_digests import block_digests, short_digest
from .life_messages import Peer


class Prefix:
    """The tokens of one leg, with the digests of their blocks, made once for each size of block."""

    def __init__(self, tokens: Sequence[int], salt: str) -> None:
        self._tokens = tokens
        self._salt = salt
        self._digests: dict[int, list[int]] = {}

    def blocks(self, block_size: int) -> list[int]:
        """Of the full blocks but for the last token, which is always computed."""
        known = self._digests.get(block_size)
        if known is None:
            chain = block_digests(self._tokens[:-1], self._salt, block_size)
            known = self._digests[block_size] = [short_digest(digest) for digest in chain]
        return known


class _Blocks(Protocol):
    def __contains__(self, digest: object, /) -> bool: ...

    def __len__(self) -> int: ...

    def changed(self, changes: pb.PrefixChanges) -> bool: ...

    def sent(self, digests: Sequence[int]) -> None: ...


class _Told:
    """By the worker's own account."""

    def __init__(self) -> None:
        self._digests: set[int] = set()
        self._sequence: int | None = None  # of the last message taken in; None: a snapshot is to come

    def __contains__(self, digest: object) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def changed(self, changes: pb.PrefixChanges) -> bool:
        if changes.snapshot:
            self._digests = set(changes.added)
        elif self._sequence is None:
            return True
        elif changes.sequence != self._sequence + 1:
            self._sequence = None
            return False
        else:
            self._digests.update(changes.added)
            self._digests.difference_update(changes.removed)
        self._sequence = changes.sequence
        return True

    def sent(self, digests: Sequence[int]) -> None:
        """The worker will say so itself."""


class _Guessed:
    """By what this router sent: the blocks that a cache of that size would keep, the oldest forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, digest: object) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def changed(self, changes: pb.PrefixChanges) -> bool:
        """Nobody was asked."""
        return True

    def sent(self, digests: Sequence[int]) -> None:
        for digest in reversed(digests):  # of one prefix the end is forgotten before the beginning
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._capacity:
            self._digests.popitem(last=False)


class PrefixIndex:
    """`told`: the workers say what they hold (they must be asked to); else it is guessed."""

    def __init__(self, told: bool) -> None:
        self.told = told
        self._workers: dict[Peer, tuple[int, _Blocks]] = {}  # size of a block, blocks

    def worker_up(self, peer: Peer, welcome: pb.Welcome) -> None:
        """A session began; what was known of that worker is forgotten."""
        blocks = _Told() if self.told else _Guessed(welcome.total_blocks)
        self._workers[peer] = (welcome.block_size, blocks)

    def worker_lost(self, peer: Peer) -> None:
        """A session ended."""
        self._workers.pop(peer, None)

    def changed(self, peer: Peer, changes: pb.PrefixChanges) -> bool:
        """Takes in what the worker says. False: something is missing before it, so that it must be asked anew."""
        known = self._workers.get(peer)
        return known is None or known[1].changed(changes)

    def sent(self, peer: Peer, prefix: Prefix) -> None:
        """The worker will come to hold this prefix."""
        if not self.told and peer in self._workers:
            size, blocks = self._workers[peer]
            blocks.sent(prefix.blocks(size))

    def cached(self, peer: Peer, prefix: Prefix) -> int:
        """Leading tokens whose KV the worker holds: whole blocks."""
        if peer not in self._workers:
            return 0
        size, blocks = self._workers[peer]
        found = 0
        if len(blocks):
            for digest in prefix.blocks(size):
                if digest not in blocks:
                    break
                found += 1
        return found * size

    def blocks(self, peer: Peer) -> int:
        """Blocks that are known at the worker."""
        known = self._workers.get(peer)
        return len(known[1]) if known is not None else 0
