"""What people see on stderr while a cluster starts: a bar per worker on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

_log = logging.getLogger(__name__)


class StartProgress:
    """Takes workers' reports. Quiet when stderr is no terminal, but for warnings."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> StartProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bars away; reports are still shown as lines."""
        self._bars.stop()

    def report(self, worker_id: str, kind: str, fields: dict[str, Any]) -> None:
        """One report of a worker or of the router."""
        if kind == "loading":
            total = int(fields["total"]) or None
            if worker_id not in self._tasks:
                self._tasks[worker_id] = self._bars.add_task(f"{worker_id}: weights", total=total)
            self._bars.update(self._tasks[worker_id], completed=int(fields["done"]), total=total)
        elif kind == "log":
            level = int(fields["level"])
            if self._verbose or level >= logging.WARNING:
                self._say(f"{worker_id}: {fields['message']}")
        elif kind == "failed" and self._verbose and fields.get("trace"):
            self._say(f"{worker_id}: {fields['trace']}")
        elif kind == "vllm" and self._verbose:
            self._say(f"{worker_id}: vllm.grpc.engine at {fields['address']}")
        elif kind == "ready" and self._verbose:
            self._say(f"{worker_id}: loaded")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
