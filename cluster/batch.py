"""`baton batch`: a file of OpenAI requests through a cluster, many at a time; a later run completes the output."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..proto.errors import ConfigError
from ..text import batch_lines
from ..text.batch_lines import BadLine, Call, Duplicate, Known
from ..text.batch_output import BatchOutput
from .access import NOBODY, Access
from .batch_progress import BatchProgress, Tally, duration
from .config import Config
from .deployment import running
from .failures import KEY_HINT, CommandFailed, OutputFailed
from .http_client import Broken, HttpConnection, Origin, Reply, Unreachable
from .model_check import ModelFacts
from .progress import StartProgress

_IN_FLIGHT = 64  # where nothing says how many sequences the cluster runs side by side
_ATTEMPTS = 8  # of one line; about a minute with the waits between them
_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_RETRYABLE = {408, 429, 502, 503}
_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done. in_flight: requests at a time; None: what keeps the cluster full."""

    source: Path
    target: Path
    in_flight: int | None
    retry_failed: bool

    def check(self) -> None:
        """Raises ConfigError for files that cannot be read or written."""
        try:
            with self.source.open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"IN: {self.source}: {error.strerror or error}") from None
        if not self.target.parent.is_dir():
            raise ConfigError(f"OUT: {self.target.parent} is no folder")
        if self.target.exists() and self.target.samefile(self.source):
            raise ConfigError(f"OUT: {self.target} is also IN; give another file")


async def with_cluster(config: Config, facts: ModelFacts, job: Job, verbose: bool, access: Access = NOBODY) -> int:
    """Start a cluster for the batch, unless nothing is left to do."""
    output = BatchOutput.open(job.target, job.retry_failed)
    try:
        total = _look(job, output.known)
        if total is None:
            return _nothing_left(output.known, job)
        progress = StartProgress(verbose)
        with progress:
            async with running(config, facts.name, progress.report) as deployment:
                progress.stop()
                _, sequences = deployment.capacity()
                in_flight = job.in_flight or min(sequences + sequences // 4 + 1, config.router.max_inflight)
                origin = Origin.parse(deployment.url)
                await _check_service(origin, access)
                return await _Run(job, output, origin, access, total).run(in_flight)
    finally:
        output.close()


async def with_url(origin: Origin, job: Job, access: Access = NOBODY) -> int:
    """Send the batch to a service that runs already. Raises CommandFailed when it does not answer."""
    output = BatchOutput.open(job.target, job.retry_failed)
    try:
        total = _look(job, output.known)
        if total is None:
            return _nothing_left(output.known, job)
        await _check_service(origin, access)
        return await _Run(job, output, origin, access, total).run(job.in_flight or _IN_FLIGHT)
    finally:
        output.close()


async def _check_service(origin: Origin, access: Access) -> None:
    connection = access.connection(origin)
    try:
        reply = await connection.request("GET", "/v1/models")
    except (Unreachable, Broken) as error:
        raise CommandFailed(f"{origin} does not answer: {error}") from None
    finally:
        connection.close()
    _check_key(origin, reply)
    if reply.status != 200:
        raise CommandFailed(f"{origin} is no service to send a batch to: /v1/models answers with {reply.status}")


def _check_key(origin: Origin, reply: Reply) -> None:
    if reply.status == 401:  # whatever is asked
        raise CommandFailed(f"{origin} takes no request without a key that it knows: {KEY_HINT}")


def _look(job: Job, done: Known) -> int | None:
    """The number of lines; None when all of them are done. Raises ConfigError when there are none.

    So the file is read twice, and never held.
    """
    total, left = 0, False
    with job.source.open("rb") as file:
        for number, raw in batch_lines.numbered(file):
            total += 1
            left = left or not done.has(_line(number, raw))
    if not total:
        raise ConfigError(f"IN: {job.source} holds no request")
    return total if left else None


def _line(number: int, raw: bytes) -> Call | BadLine:
    try:
        return batch_lines.read_call(number, raw)
    except BadLine as bad:
        return bad


def _nothing_left(done: Known, job: Job) -> int:
    print(f"batch: every line of {job.source} is in {job.target} already", file=sys.stderr)
    return 1 if done.failed else 0


class _Run:
    """One run over the lines that are left."""

    def __init__(self, job: Job, output: BatchOutput, origin: Origin, access: Access, total: int) -> None:
        self._job = job
        self._output = output
        self._origin = origin
        self._access = access
        self._tally = Tally(total, time.monotonic())
        self._rng = random.Random()

    async def run(self, in_flight: int) -> int:
        """Exit code 0 when every line of the output was served. Raises CommandFailed when the service or the output is
        gone."""
        print(f"batch: {self._tally.total:,} lines, {in_flight} requests at a time", file=sys.stderr, flush=True)
        try:
            await self._drive(in_flight)
        except asyncio.CancelledError:
            print(f"batch: {self._how_to_go_on()}", file=sys.stderr, flush=True)
            raise
        except ExceptionGroup as group:
            if isinstance(group.exceptions[0], CommandFailed):
                raise CommandFailed(f"{group.exceptions[0]}; {self._how_to_go_on()}") from None
            raise
        return self._finish()

    async def _drive(self, in_flight: int) -> None:
        with self._job.source.open("rb") as file, BatchProgress(self._tally) as progress:
            calls = self._calls(batch_lines.numbered(file))
            ticker = asyncio.create_task(_tick(progress))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(in_flight):
                        group.create_task(self._serve(calls))
            finally:
                ticker.cancel()
                progress.show(time.monotonic())

    def _calls(self, lines: Iterator[tuple[int, bytes]]) -> Iterator[Call]:
        """The requests that are left; bad lines go to the output on the way."""
        done, taken = self._output.known, set[str]()
        for number, raw in lines:
            line = _line(number, raw)
            if line.custom_id in taken:
                line = Duplicate(number, line.custom_id, "custom_id: an earlier line has the same one")
            if done.has(line):
                self._tally.skipped += 1
                continue
            if line.custom_id is not None:
                taken.add(line.custom_id)
            if isinstance(line, BadLine):
                self._record(batch_lines.bad(line))
            else:
                yield line

    async def _serve(self, calls: Iterator[Call]) -> None:
        """Send one request after the other over one connection."""
        connection = self._access.connection(self._origin)
        try:
            for call in calls:
                self._record(await self._one(connection, call))
        finally:
            connection.close()

    async def _one(self, connection: HttpConnection, call: Call) -> dict[str, Any]:
        """The output line of a request, tried until it is served, refused for good, or has had its attempts."""
        for attempt in range(1, _ATTEMPTS + 1):
            hint_s = 0.0
            try:
                reply = await connection.request("POST", call.url, call.body)
                _check_key(self._origin, reply)
                if reply.status not in _RETRYABLE or attempt == _ATTEMPTS:
                    return _answer(call, reply)
                hint_s = _seconds(reply.headers.get("retry-after", ""))
            except Unreachable as error:
                if attempt == _ATTEMPTS:
                    raise CommandFailed(f"{self._origin} does not answer any more: {error}") from None
            except Broken as error:
                if attempt == _ATTEMPTS:
                    return batch_lines.unanswered(call.number, call.custom_id, "unavailable", str(error))
            await asyncio.sleep(pause_s(attempt, hint_s, self._rng.random()))
        raise AssertionError("the last attempt returns or raises")

    def _record(self, line: dict[str, Any]) -> None:
        try:
            self._output.add(line)
        except OSError as error:
            raise OutputFailed(f"cannot write to {self._job.target}: {error.strerror or error}") from None
        if batch_lines.succeeded(line):
            self._tally.answered += 1
            usage = line["response"]["body"].get("usage") or {}
            self._tally.tokens += usage.get("completion_tokens") or 0
        else:
            self._tally.failed += 1

    def _finish(self) -> int:
        tally = self._tally
        seconds = time.monotonic() - tally.started_s
        print(
            f"batch: {tally.answered:,} answered and {tally.failed:,} failed in {duration(seconds)}; "
            f"{tally.tokens:,} output tokens, {tally.tokens_per_s(time.monotonic()):,.1f} tokens/s",
            file=sys.stderr,
        )
        failed = tally.failed + self._output.known.failed
        if failed:
            print(f"batch: {self._job.target} has {failed:,} errors; --retry-failed tries them again", file=sys.stderr)
        return 1 if failed else 0

    def _how_to_go_on(self) -> str:
        return f"{self._tally.done:,} of {self._tally.total:,} lines are done; run the same command again to go on"


async def _tick(progress: BatchProgress) -> None:
    while True:
        progress.show(time.monotonic())
        await asyncio.sleep(_TICK_S)


def pause_s(attempt: int, hint_s: float, random_part: float) -> float:
    """How long to wait after attempt number `attempt` (from 1): doubling, spread by half so that not all come back at
    once, and not before the service's own hint. random_part: in [0, 1)."""
    backoff = min(_WAIT_S * 2.0 ** (attempt - 1), _LONGEST_WAIT_S)
    return max(backoff, min(hint_s, _LONGEST_WAIT_S)) * (1 + random_part / 2)


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _answer(call: Call, reply: Reply) -> dict[str, Any]:
    """What the service answered; a body that is no JSON object is an error of its own."""
    try:
        body = json.loads(reply.body)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        text = f"status {reply.status}, and the body is no JSON object: {reply.body[:200].decode('utf-8', 'replace')}"
        return batch_lines.unanswered(call.number, call.custom_id, "no_json", text)
    return batch_lines.answered(call, reply.status, reply.headers.get("x-request-id", ""), body)
