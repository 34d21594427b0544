"""Which links a prefill rank holds open: at most so many at once, and who may have the next place.

A leg gets all links that it lacks at once or waits in line, holding none: two legs can never wait for each other's
links. While somebody waits nobody passes. When there is no place, the idle link that was used least recently is
closed; a place is free again when a link's descriptors are. Not thread-safe: the sender's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

LinkKey = tuple[str, str]  # address, incarnation


class PooledLink(Protocol):
    """What the pool needs of a link."""

    @property
    def key(self) -> LinkKey: ...
    @property
    def idle(self) -> bool:
        """Whether no leg needs it."""
        ...

    @property
    def used_at(self) -> float:
        """When a leg last needed it."""
        ...

    def stop(self) -> None:
        """End soon."""
        ...


L = TypeVar("L", bound=PooledLink)


class LinkPool(Generic[L]):
    """Links of type L, by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._usable: dict[LinkKey, L] = {}
        self._leaving: set[L] = set()  # in no use any more, but their descriptors are

    def __len__(self) -> int:
        return len(self._usable) + len(self._leaving)

    @property
    def keys(self) -> list[LinkKey]:
        """Of the links that can be used."""
        return list(self._usable)

    @property
    def all(self) -> list[L]:
        """Every link that holds descriptors."""
        return [*self._usable.values(), *self._leaving]

    def obtain(self, keys: Iterable[LinkKey], make: Callable[[LinkKey], L]) -> tuple[dict[LinkKey, L], list[L]] | None:
        """Links for all these keys, and those of them that are new; None when there is no place for all yet.

        Then idle links were told to leave, as many as are needed; ask again when one has.
        """
        wanted = set(keys)
        lacking = [key for key in sorted(wanted) if key not in self._usable]
        excess = len(self) + len(lacking) - self._limit
        if lacking and excess > 0:
            self._make_room(excess - len(self._leaving), wanted)
            return None
        fresh = [make(key) for key in lacking]
        self._usable.update({link.key: link for link in fresh})
        return {key: self._usable[key] for key in wanted}, fresh

    def leave(self, link: L) -> None:
        """Take a link out of use; it is still open."""
        if self._usable.get(link.key) is link:
            del self._usable[link.key]
            self._leaving.add(link)

    def gone(self, link: L) -> None:
        """The link's descriptors are closed."""
        self.leave(link)
        self._leaving.discard(link)

    def _make_room(self, count: int, spared: set[LinkKey]) -> None:
        idle = [link for key, link in self._usable.items() if link.idle and key not in spared]
        for link in sorted(idle, key=lambda link: link.used_at)[: max(0, count)]:
            self.leave(link)
            link.stop()
