"""`baton generate`: one prompt, streamed, or a file of requests, run together and answered in input order."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from ..client.api import Client
from ..client.completion import Choice, Completion
from ..proto import baton_pb2 as api
from ..proto.errors import BatonError
from .access import NOBODY, Access
from .config import Config
from .deployment import running
from .failures import error_text
from .membership import Member
from .model_check import ModelFacts
from .output import say
from .progress import StartProgress
from .report import print_report
from .requests_input import RequestLine

_CONCURRENT = 64


async def with_cluster(
    config: Config,
    facts: ModelFacts,
    lines: Sequence[RequestLine],
    as_json: bool,
    report: bool,
    verbose: bool,
    access: Access = NOBODY,
) -> int:
    """Start a cluster for these requests only."""
    progress = StartProgress(verbose)
    started = time.monotonic()
    with progress:
        async with running(config, facts.name, progress.report) as deployment:
            progress.stop()
            start_s = time.monotonic() - started
            members = list(deployment.controller.feed.view.members.values())
            address = deployment.endpoints["grpc"]
            return await with_address(address, lines, as_json, report, members, start_s, access)


async def with_address(
    address: str,
    lines: Sequence[RequestLine],
    as_json: bool,
    report: bool,
    members: Sequence[Member] = (),
    start_s: float | None = None,
    access: Access = NOBODY,
) -> int:
    """Send the requests to a router; `members` lets the report say where its workers run."""
    async with access.client(address) as client:
        if len(lines) == 1 and not as_json:
            completions = [await _streamed(client, lines[0])]
        else:
            completions = await _together(client, lines)
    if report:
        print_report([done for done in completions if done is not None], members, start_s)
    return 0 if None not in completions else 1


async def _streamed(client: Client, line: RequestLine) -> Completion | None:
    """Text to stdout as it comes; several choices one after the other at the end."""
    completion = Completion(time.monotonic(), [])
    single = (line.n or 1) == 1
    try:
        async for message in client.stream(line.to_wire()):
            completion.take(message, time.monotonic())
            if single and message.WhichOneof("event") == "tokens" and message.tokens.text:
                say(message.tokens.text, end="")
    except BatonError as error:
        if completion.choices:
            say("")
        print(f"baton: {error_text(error)}", file=sys.stderr)
        return None
    if single:
        say("")
    else:
        for index, choice in enumerate(completion.choices):
            say(f"[{index}] {choice.text}")
    return completion


async def _together(client: Client, lines: Sequence[RequestLine]) -> list[Completion | None]:
    """All requests, a bounded number at a time; a JSON line each, in input order, as soon as its turn has come."""
    permits = asyncio.Semaphore(_CONCURRENT)

    async def one(line: RequestLine) -> Completion | BatonError:
        async with permits:
            try:
                return await client.complete(line.to_wire())
            except BatonError as error:
                return error

    tasks = [asyncio.create_task(one(line)) for line in lines]
    completions: list[Completion | None] = []
    try:
        for number, (line, task) in enumerate(zip(lines, tasks, strict=True)):
            result = await task
            name = number if line.id is None else line.id
            say(json.dumps(output_line(name, result), ensure_ascii=False))
            completions.append(result if isinstance(result, Completion) else None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return completions


def output_line(name: str | int, result: Completion | BatonError) -> dict[str, Any]:
    """One JSON output line. Several choices: `text` and so on are those of the first, and `choices` has all."""
    if isinstance(result, BatonError):
        return {"id": name, "error": {"code": result.code, "message": result.message, "field": result.field}}
    choices = [_choice(choice) for choice in result.choices] or [_choice(Choice())]
    line: dict[str, Any] = {"id": name, **choices[0]}
    if len(choices) > 1:
        line["choices"] = [{"index": index, **choice} for index, choice in enumerate(choices)]
    if result.prompt_logprobs:
        line["prompt_logprobs"] = _scores(result.prompt_logprobs)
    line["usage"] = _fields(result.usage)
    line["timing"] = _fields(result.timing)
    return line


def _choice(choice: Choice) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
    }
    if choice.logprobs:
        fields["logprobs"] = _scores(choice.logprobs)
    return fields


def _scores(scores: Sequence[api.TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {"logprob": token.logprob, "top": [{"token_id": t.token_id, "logprob": t.logprob} for t in token.top]}
        for token in scores
    ]


def _fields(message: Any) -> dict[str, Any] | None:
    if message is None:
        return None
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {name: int(value) if name == "kv_bytes" else value for name, value in fields.items()}
