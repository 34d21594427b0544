"""The launcher without Ray: every rank is a child process on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .child import Child, Report
from .launcher import PlacementFailed
from .spec import WorkerSpec, spec_to_json

RANK_COMMAND = (sys.executable, "-m", "baton.cluster.rank_process")


@dataclass(frozen=True)
class ProcessSlot:
    """Room for one worker: one GPU for each rank, or none."""

    ranks: int
    devices: tuple[str, ...]


class ProcessLauncher:
    """Starts ranks with `command`, which reads its specification on stdin (see child.py)."""

    def __init__(self, command: Sequence[str] = RANK_COMMAND) -> None:
        self._command = command
        self._free = visible_devices()

    async def open(self) -> None:
        """Nothing to prepare."""

    async def reserve(self, name: str, ranks: int, device: str) -> ProcessSlot:
        """CPU ranks always fit; a GPU rank needs a device of its own. Raises PlacementFailed."""
        if device != "cuda":
            return ProcessSlot(ranks, ())
        if len(self._free) < ranks:
            raise PlacementFailed(f"{name} needs {ranks} GPUs, but only {len(self._free)} are free on this machine")
        taken, self._free = self._free[:ranks], self._free[ranks:]
        return ProcessSlot(ranks, tuple(taken))

    async def start(self, slot: ProcessSlot, spec: WorkerSpec, on_report: Report) -> Child:
        """Start one rank."""
        visible = slot.devices[spec.rank] if slot.devices else ""
        return await Child.spawn(self._command, spec_to_json(spec), on_report, {"CUDA_VISIBLE_DEVICES": visible})

    async def release(self, slot: ProcessSlot) -> None:
        """Give GPUs back."""
        self._free += slot.devices

    async def close(self) -> None:
        """Nothing is left: the controller has stopped every rank."""


def visible_devices() -> list[str]:
    """GPU indices that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(found, key=int)
