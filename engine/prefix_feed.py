"""What a worker tells routers about its prefix cache: everything to one that begins to watch, then what changes.

Sans-I/O. Changes between two messages are netted, so that a block which came and went is not mentioned. There are never
more of them than the pool has blocks: beyond that everybody is told everything instead. Nothing is kept while nobody
watches.
"""

from __future__ import annotations

from ..proto import worker_pb2 as pb
from ..proto.block_digests import short_digest
from .block_pool import BlockPool


class PrefixFeed:
    """Listens to `pool`; both are the engine thread's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sequence = 0
        self._changes: dict[bytes, bool] = {}  # digest -> whether it can be found now; it could not, or could, before
        self._watchers: dict[int, bool] = {}  # session -> whether it is owed a snapshot

    def watch(self, session: int) -> None:
        """This session is told everything next, and changes from then on."""
        self._watchers[session] = True
        self._pool.listener = self

    def forget(self, session: int) -> None:
        """The session has ended; an unknown one is no error."""
        self._watchers.pop(session, None)
        if not self._watchers:
            self._pool.listener = None
            self._changes.clear()

    def added(self, digest: bytes) -> None:
        """A block can be found."""
        self._changed(digest, now=True)

    def removed(self, digest: bytes) -> None:
        """A block cannot be found any more."""
        self._changed(digest, now=False)

    def take(self) -> list[tuple[int, pb.WorkerEvent]]:
        """What is to be said since the last call, by session."""
        changed = None
        if self._changes:
            self._sequence += 1
            changed = self._event(
                snapshot=False,
                added=[short_digest(digest) for digest, now in self._changes.items() if now],
                removed=[short_digest(digest) for digest, now in self._changes.items() if not now],
            )
            self._changes.clear()
        everything = None
        if any(self._watchers.values()):
            everything = self._event(snapshot=True, added=[short_digest(d) for d in self._pool.prefixes], removed=[])
        said: list[tuple[int, pb.WorkerEvent]] = []
        for session, owed in self._watchers.items():
            event = everything if owed else changed
            if event is not None:
                said.append((session, event))
            self._watchers[session] = False
        return said

    def _event(self, *, snapshot: bool, added: list[int], removed: list[int]) -> pb.WorkerEvent:
        changes = pb.PrefixChanges(sequence=self._sequence, snapshot=snapshot, added=added, removed=removed)
        return pb.WorkerEvent(prefixes=changes)

    def _changed(self, digest: bytes, *, now: bool) -> None:
        if self._changes.get(digest, now) is not now:
            del self._changes[digest]
            return
        self._changes[digest] = now
        if len(self._changes) > self._pool.total:
            self._changes.clear()
            self._watchers = dict.fromkeys(self._watchers, True)
