"""Batches of requests, from a file to a file, behind everybody else's; one that a restart broke off goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..proto.errors import BatonError, InternalError
from ..text import batch_lines
from ..text.batch_lines import BadLine, Call, Known
from ..text.batch_output import BatchOutput
from .batch_store import BatchStore, Json, batch_over
from .front_door import FrontDoor
from .openai_calls import Running, read_call
from .openai_shapes import error_body
from .params import BatchParams, TenantParams
from .tenants import ANYBODY, current
from .validate import MAX_PRIORITY

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 30.0
_LOOK_S = 5.0  # for batches that another router left behind
_SAVE_S = 1.0  # between two notes of how far a batch is
MAX_LINES = 50_000
_TENANTS = "tenants"  # a folder beside those of a store


class Batches:
    """Runs the batches of every tenant, a tenant's one after the other, each in a folder of its own. Raises OSError.

    With no tenants configured everything is ANYBODY's. `parallelism`: requests of a batch at the same time.
    """

    def __init__(self, door: FrontDoor, options: BatchParams, folder: Path, rng: random.Random) -> None:
        self._door = door
        self._parallelism = options.parallelism
        self._rng = rng
        self._owners = door.params.tenants or (ANYBODY,)
        folders = {one.name: folder / _TENANTS / one.name if one.name else folder for one in self._owners}
        self._stores = {name: BatchStore(place, options.files) for name, place in folders.items()}
        self._wake = {name: asyncio.Event() for name in folders}

    @property
    def store(self) -> BatchStore:
        """Files and batches of the tenant that is being served."""
        return self._stores[current.get().name]

    def look(self) -> None:
        """That tenant has a new batch."""
        self._wake[current.get().name].set()

    async def run(self) -> None:
        """Until it is cancelled; what is then under way goes on at the next start."""
        async with asyncio.TaskGroup() as group:
            for owner in self._owners:
                group.create_task(self._run_all(owner))

    async def _run_all(self, owner: TenantParams) -> None:
        """As the tenant itself: its rate, its share, its salt."""
        current.set(owner)
        while True:
            for batch in reversed(await asyncio.to_thread(self.store.batches)):
                if not batch_over(batch):
                    await self._run_safely(batch)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake[owner.name].wait(), _LOOK_S)
            self._wake[owner.name].clear()

    async def _run_safely(self, batch: Json) -> None:
        claim = await asyncio.to_thread(self.store.claim, batch["id"])
        if claim is None:
            return  # another router runs it
        try:
            batch = await asyncio.to_thread(self.store.batch, batch["id"])
            if not batch_over(batch):
                await _Run(self._door, self.store, batch, self._parallelism, self._rng).run()
        except Exception as error:
            _log.exception("%s cannot go on", batch["id"])
            _fail(batch, "internal", f"the batch cannot go on: {error}")
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.store.save, batch)
        finally:
            os.close(claim)


class _Run:
    """One batch, to its end."""

    def __init__(self, door: FrontDoor, store: BatchStore, batch: Json, parallelism: int, rng: random.Random) -> None:
        self._door = door
        self._store = store
        self._batch = batch
        self._parallelism = parallelism
        self._rng = rng
        self._saved_at = 0.0
        self._stopped = False
        self._reading = asyncio.Lock()

    async def run(self) -> None:
        batch, store = self._batch, self._store
        source = store.data_path(batch["input_file_id"])
        if batch["status"] == "validating" and not await self._begin(source):
            return
        done, failed = await asyncio.to_thread(self._open)
        try:
            self._count(done.known, failed.known)
            lines = self._left(source, done.known, failed.known)
            async with asyncio.TaskGroup() as group:
                for _ in range(self._parallelism):
                    group.create_task(self._work(lines, done, failed))
        finally:
            done.close()
            failed.close()
        await self._finish()

    async def _begin(self, source: Path) -> bool:
        """Looks at every line; False: the batch failed."""
        batch = self._batch
        total, problem = await asyncio.to_thread(_look, source, batch["endpoint"], self._door.params.limits.body_bytes)
        if problem:
            _fail(batch, "invalid_input", problem)
        else:
            for key, name in (("output_file_id", "output"), ("error_file_id", "errors")):
                made = await asyncio.to_thread(self._store.new_file, f"{batch['id']}_{name}.jsonl", "batch_output")
                batch[key] = made["id"]
            batch["request_counts"]["total"] = total
            batch["status"], batch["in_progress_at"] = "in_progress", int(time.time())
        await asyncio.to_thread(self._store.save, batch)
        return not problem

    def _open(self) -> tuple[BatchOutput, BatchOutput]:
        """What the lines go to. Raises ConfigError for a file that is no output of ours."""
        done = BatchOutput.open(self._store.data_path(self._batch["output_file_id"]), False)
        try:
            return done, BatchOutput.open(self._store.data_path(self._batch["error_file_id"]), False)
        except BaseException:
            done.close()
            raise

    def _count(self, done: Known, failed: Known) -> None:
        counts = self._batch["request_counts"]
        counts["completed"], counts["failed"] = done.answered, failed.failed + failed.answered

    def _left(self, source: Path, *known: Known) -> Iterator[Call | BadLine]:
        """The lines that have no answer yet."""
        seen: set[str] = set()
        with source.open("rb") as file:
            for number, raw in batch_lines.numbered(file):
                line = _line(number, raw, seen, self._door.params.limits.body_bytes)
                if not any(output.has(line) for output in known):
                    yield line

    async def _work(self, lines: Iterator[Call | BadLine], done: BatchOutput, failed: BatchOutput) -> None:
        batch = self._batch
        while not await self._over():
            async with self._reading:
                line = await asyncio.to_thread(next, lines, None)
            if line is None:
                return
            answer = batch_lines.bad(line) if isinstance(line, BadLine) else await self._one(line)
            if answer is None:
                return
            good = batch_lines.succeeded(answer)
            await asyncio.to_thread((done if good else failed).add, answer)
            batch["request_counts"]["completed" if good else "failed"] += 1
            if time.monotonic() - self._saved_at > _SAVE_S:
                self._saved_at = time.monotonic()
                await asyncio.to_thread(self._store.save, batch)

    async def _over(self) -> bool:
        """Whether the batch was cancelled, or its time is up."""
        if not self._stopped:
            late = time.time() >= self._batch["expires_at"]
            self._stopped = late or await asyncio.to_thread(self._store.is_to_stop, self._batch["id"])
        return self._stopped

    async def _one(self, call: Call) -> Json | None:
        """The output line of a request, tried until it is served or refused for good; None: the batch was stopped."""
        wait_s = 0.2
        while True:
            running: Running | None = None
            try:
                body = {"priority": MAX_PRIORITY, **json.loads(call.body)}
                running = Running(self._door, read_call(self._door, call.url, json.dumps(body).encode(), ""))
                request_id = await running.start()
                whole: Any = await running.whole(lambda builder: builder.whole())
                return batch_lines.answered(call, 200, request_id, whole)
            except BatonError as error:
                if not error.retryable:
                    return batch_lines.answered(call, error.http_status, "", error_body(error))
                wait_s = min(_LONGEST_WAIT_S, max(2 * wait_s, error.retry_after_s))
            except Exception:
                _log.exception("%s: line %d", self._batch["id"], call.number)
                error_line = error_body(InternalError("internal error"))
                return batch_lines.answered(call, 500, "", error_line)
            finally:
                if running is not None:
                    running.cancel()
            await asyncio.sleep(wait_s * (1 + self._rng.random() / 2))
            if await self._over():
                return None

    async def _finish(self) -> None:
        batch, now = self._batch, int(time.time())
        status = "completed"
        if self._stopped:
            status = "cancelled" if self._store.is_to_stop(batch["id"]) else "expired"
        batch["status"], batch[f"{status}_at"] = status, now
        for key in ("output_file_id", "error_file_id"):  # none where nothing was written
            path = self._store.data_path(batch[key])
            if path.exists() and not path.stat().st_size:
                empty, batch[key] = batch[key], None
                await asyncio.to_thread(self._store.save, batch)
                await asyncio.to_thread(self._store.delete_file, empty)
        await asyncio.to_thread(self._store.save, batch)


def _fail(batch: Json, code: str, message: str) -> None:
    error = {"code": code, "message": message, "line": None, "param": None}
    batch["status"], batch["failed_at"] = "failed", int(time.time())
    batch["errors"] = {"object": "list", "data": [error]}


def _look(source: Path, endpoint: str, limit: int) -> tuple[int, str]:
    """(lines, what is wrong with the file as a whole)."""
    total = 0
    with source.open("rb") as file:
        for number, raw in batch_lines.numbered(file):
            total += 1
            line = _line(number, raw, set(), limit)
            if isinstance(line, Call) and line.url != endpoint:
                return total, f"line {number}: url: must be the batch's endpoint, {endpoint}"
            if total > MAX_LINES:
                return total, f"more than {MAX_LINES} lines"
    return total, "" if total else "the file holds no request"


def _line(number: int, raw: bytes, seen: set[str], limit: int) -> Call | BadLine:
    """limit: bytes of one line, as of one HTTP body."""
    if len(raw) > limit:
        return BadLine(number, None, f"the line has more than {limit} bytes")
    try:
        call = batch_lines.read_call(number, raw)
    except BadLine as bad:
        return bad
    if call.custom_id in seen:
        return batch_lines.Duplicate(number, call.custom_id, "custom_id: an earlier line has it")
    seen.add(call.custom_id)
    return call
