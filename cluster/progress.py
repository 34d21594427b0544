"""What people see on stderr while a cluster starts: a bar per worker on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

_log = logging.getLogger(__name__)
_REQUEST = re.compile(r"\breq-[0-9a-f]{32}\b")


def json_line(process: str, fields: dict[str, Any], now: float) -> str:
    """A log record of a process as JSON. now: seconds since 1970. `request_id` is there when the message names one."""
    record: dict[str, Any] = {"time": round(now, 6), "process": process}
    record["level"] = logging.getLevelName(int(fields["level"])).lower()
    record |= {"logger": fields.get("logger", ""), "message": fields["message"]}
    named = _REQUEST.search(fields["message"])
    if named:
        record["request_id"] = named.group()
    return json.dumps(record, ensure_ascii=False)


class StartProgress:
    """Takes workers' reports. Quiet when stderr is no terminal, but for warnings."""

    def __init__(self, verbose: bool, as_json: bool = False) -> None:
        """as_json: what processes log is printed whole, one JSON object a line."""
        self._verbose = verbose
        self._as_json = as_json
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
            if self._as_json:
                self._say(json_line(worker_id, fields, time.time()))
            elif self._verbose or level >= logging.WARNING:
                self._say(f"{worker_id}: {fields['message']}")
        elif kind == "failed" and self._verbose and fields.get("trace"):
            self._say(f"{worker_id}: {fields['trace']}")
        elif kind == "vllm" and self._verbose:
            self._say(f"{worker_id}: vllm.grpc.engine at {fields['address']}")
        elif kind == "ready" and self._verbose:
            self._say(f"{worker_id}: loaded")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
