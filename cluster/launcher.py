"""What the controller needs of a launcher: room for a worker's ranks, and processes that run in it.

Two implementations: `launcher_process` (children of this process) and `launcher_ray` (actors in placement groups).
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from .child import Report
from .spec import WorkerSpec


class PlacementFailed(Exception):
    """There is no room for a worker's ranks; the message says what is short."""


class Slot(Protocol):
    """Room for all ranks of one worker."""

    @property
    def ranks(self) -> int:
        """How many."""
        ...


class Rank(Protocol):
    """One running rank."""

    @property
    def config_error(self) -> bool:
        """Whether it ended because of a mistake in the configuration."""
        ...

    async def wait(self) -> str:
        """Wait for its end; says how it ended, "" for a regular end."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ask it to end; kill it after `grace_s` (0: at once). Returns when it has ended."""
        ...


S = TypeVar("S", bound=Slot)


class Launcher(Protocol[S]):
    """Starts ranks."""

    async def open(self) -> None:
        """Make ready; called once."""
        ...

    async def reserve(self, name: str, ranks: int, device: str) -> S:
        """Room for `ranks` ranks that must be close to each other. Raises PlacementFailed."""
        ...

    async def start(self, slot: S, spec: WorkerSpec, on_report: Report) -> Rank:
        """Start rank `spec.rank` in its place of the slot; reports arrive on the event loop, in order."""
        ...

    async def release(self, slot: S) -> None:
        """Give the room back; its ranks have ended."""
        ...

    async def close(self) -> None:
        """End whatever is left."""
        ...
