"""A child process of ours, seen from both sides: specification in as one JSON line on stdin, reports out as JSON lines
on stdout. A child never outlives its parent: it dies by signal, and when its stdin ends.

Parent: `Child.spawn`. Child: `run_child` around its main function.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..proto.errors import ConfigError
from .early import quiet_grpc
from .processes import die_with_parent

Report = Callable[[str, dict[str, Any]], None]
Main = Callable[[dict[str, Any], Report, threading.Event], None]

_STOP_LINE = b"stop\n"
_LINE_LIMIT = 2**20
_ORPHAN_GRACE_S = 1.0
_log = logging.getLogger(__name__)


class ReportHandler(logging.Handler):
    """Sends log records to the parent as reports."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            text = self.format(record)
            self._report("log", {"level": record.levelno, "logger": record.name, "message": text})


def guarded(main: Callable[[], None], report: Report) -> int:
    """Run `main`; a failure becomes a `failed` report {message, config, trace}. Returns the exit code."""
    try:
        main()
    except ConfigError as error:
        report("failed", {"message": str(error), "config": True, "trace": ""})
        return 2
    except BaseException as error:
        message = str(error) or type(error).__name__
        report("failed", {"message": message, "config": False, "trace": traceback.format_exc()})
        return 1
    return 0


def run_child(main: Main) -> None:
    """The whole life of a child process: `main(spec, report, stop)`, then exit. Does not return."""
    quiet_grpc()
    parent = os.getppid()
    die_with_parent(signal.SIGKILL, parent)
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print goes to stderr
    stop, lock = threading.Event(), threading.Lock()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def report(kind: str, fields: dict[str, Any]) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            reports.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(1)
    threading.Thread(target=_watch_parent, args=(stop,), daemon=True, name="parent-watch").start()
    logging.basicConfig(level=logging.INFO, handlers=[ReportHandler(report)], format="%(message)s")
    code = guarded(lambda: main(json.loads(line), report, stop), report)
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: native threads may still run


def _watch_parent(stop: threading.Event) -> None:
    if sys.stdin.buffer.readline() == _STOP_LINE:
        stop.set()
        sys.stdin.buffer.readline()  # until the end
    stop.set()
    threading.Event().wait(_ORPHAN_GRACE_S)
    os._exit(1)


class Child:
    """A running child process. Its reports arrive on the event loop, in order, `on_report(kind, fields)`."""

    def __init__(self, process: asyncio.subprocess.Process, on_report: Report) -> None:
        self._process = process
        self._on_report = on_report
        self._failure = ""
        self.config_error = False
        self._ended = asyncio.create_task(self._follow())

    @staticmethod
    async def spawn(
        command: Sequence[str], spec: dict[str, Any], on_report: Report, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start `command` (which calls `run_child`) and give it its specification."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **(env or {})},
            limit=_LINE_LIMIT,
        )
        if process.stdin is None:
            raise OSError("no pipe to the child")
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(spec).encode() + b"\n")
            await process.stdin.drain()
        return Child(process, on_report)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def wait(self) -> str:
        """Wait for the end; says how it ended, "" for a regular end."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end; kill it after `grace_s`. With 0 it is killed at once."""
        if grace_s > 0 and not self._ended.done() and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(_STOP_LINE)
            await asyncio.wait([self._ended], timeout=grace_s)
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self.wait()

    async def _follow(self) -> str:
        stdout = self._process.stdout
        while stdout is not None and (line := await self._line(stdout)):
            with contextlib.suppress(ValueError, AttributeError):
                fields = json.loads(line)
                kind = fields.pop("kind", "")
                if kind == "failed":
                    self._failure, self.config_error = str(fields.get("message", "")), bool(fields.get("config"))
                try:
                    self._on_report(kind, fields)
                except Exception:
                    _log.exception("handling a %r report failed", kind)
        code = await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return self._failure or _describe(code)

    @staticmethod
    async def _line(stdout: asyncio.StreamReader) -> bytes:
        try:
            return await stdout.readline()
        except ValueError:  # longer than the limit: dropped
            return b"\n"


def _describe(code: int) -> str:
    if code == 0:
        return ""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
