"""The OpenAI batch file format: a line of input to a call, what came of it to a line of output, and what an output file
of an earlier run holds already. No clock, no network."""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ..proto.errors import ConfigError
from . import strict_json

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE = 64 << 20  # bytes of one line of input; far more than any server takes
_FIELDS = ("custom_id", "method", "url", "body")
_ID = b'{"id": "batch_req_'  # how each line of ours begins, and thus what is left of one that was cut off


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the file: `body` is to be sent to `url`."""

    number: int  # of its line, from 1
    custom_id: str
    url: str
    body: bytes


class BadLine(Exception):
    """A line that is no request; `custom_id` is None where the line does not have a usable one."""

    code = "invalid_line"

    def __init__(self, number: int, custom_id: str | None, message: str) -> None:
        super().__init__(message)
        self.number = number
        self.custom_id = custom_id


class Duplicate(BadLine):
    """A line whose custom id an earlier one has: the id stands for that one."""

    code = "duplicate_custom_id"


# ---- input ------------------------------------------------------------------------------------------------------


def numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1, one at a time. A longer one than MAX_LINE is cut to
    MAX_LINE + 1 bytes."""
    number = 0
    while raw := file.readline(MAX_LINE + 1):
        number += 1
        rest = raw
        while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE + 1)
        if raw.strip():
            yield number, raw


def read_call(number: int, raw: bytes) -> Call:
    """The request in a line. Raises BadLine, which says what is wrong and, where it can, with which field."""
    if len(raw) > MAX_LINE:
        raise BadLine(number, None, f"the line is longer than {MAX_LINE >> 20} MiB")
    try:
        fields = strict_json.loads(raw)
    except strict_json.JsonError as error:
        raise BadLine(number, None, f"{error.field}: {error}" if error.field else str(error)) from None
    if not isinstance(fields, dict):
        raise BadLine(number, None, f"expected an object with {', '.join(_FIELDS)}")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(number, None, "custom_id: must be a text that is not empty and that no other line has")
    problem = _problem(fields)
    if problem:
        raise BadLine(number, custom_id, problem)
    return Call(number, custom_id, fields["url"], json.dumps(fields["body"]).encode())


def _problem(fields: dict[str, Any]) -> str:
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _FIELDS, n=1)
        return f"{unknown[0]:.100}: unknown field" + (f"; did you mean {near[0]}?" if near else "")
    if fields.get("method") != "POST":
        return "method: must be POST"
    if fields.get("url") not in ENDPOINTS:
        return f"url: must be {' or '.join(ENDPOINTS)}"
    body = fields.get("body")
    if not isinstance(body, dict):
        return "body: must be an object, the request itself"
    return "body.stream: the answers of a batch come whole; leave it out" if body.get("stream") else ""


# ---- output -----------------------------------------------------------------------------------------------------


def answered(call: Call, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The line for what the service answered; `body` is its JSON, an error's included."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _new_id(), "custom_id": call.custom_id, "response": response, "error": None}


def bad(line: BadLine) -> dict[str, Any]:
    """The line for a line that is no request."""
    return unanswered(line.number, line.custom_id, line.code, str(line))


def unanswered(number: int, custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    """The line for a request that nobody answered."""
    error = {"code": code, "message": message, "param": None, "line": number}
    return {"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}


def succeeded(line: dict[str, Any]) -> bool:
    """Whether the request of an output line was served."""
    return line["error"] is None and line["response"]["status_code"] == 200


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


# ---- resuming ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Known:
    """What an output file holds."""

    ids: set[str] = field(default_factory=set)  # custom ids
    numbers: set[int] = field(default_factory=set)  # of bad lines that no custom id stands for
    answered: int = 0
    failed: int = 0
    size: int = 0  # bytes of its whole lines
    torn: bytes = b""  # what is behind them: a line that was cut off
    unended: bool = False  # the last whole line lacks only its line break

    def has(self, line: Call | BadLine) -> bool:
        """Whether an input line is done. The numbers count for bad lines only, so that no request is passed over when
        lines were put in before it."""
        if line.custom_id is None or isinstance(line, Duplicate):
            return line.number in self.numbers
        return line.custom_id in self.ids


def known(lines: Iterable[bytes], name: str) -> Known:
    """What the lines of an output file say. Raises ConfigError for a file that is no batch output, since nothing may be
    appended to it or cut off it."""
    found = Known()
    for number, raw in enumerate(lines, start=1):
        line = _output_line(raw)
        if line is None:
            if raw.endswith(b"\n") or not (raw.startswith(_ID) or _ID.startswith(raw)):
                raise ConfigError(f"{name}:{number}: not a line of a batch's output; give another file as OUT")
            found.torn = raw
            break
        _take(found, line)
        found.size += len(raw)
        found.unended = not raw.endswith(b"\n")
    return found


def _take(found: Known, line: dict[str, Any]) -> None:
    error = line["error"] or {}
    if line["custom_id"] is None or error.get("code") == Duplicate.code:
        found.numbers.add(error.get("line", 0))
    else:
        found.ids.add(line["custom_id"])
    if succeeded(line):
        found.answered += 1
    else:
        found.failed += 1


def _output_line(raw: bytes) -> dict[str, Any] | None:
    """The line, or None where it is none of ours."""
    try:
        line = json.loads(raw)
        response, error = line["response"], line["error"]
        shaped = isinstance(line["custom_id"], str | None) and isinstance(error, dict | None)
        status = 0 if response is None else response["status_code"]
    except (ValueError, TypeError, KeyError):
        return None
    return line if shaped and isinstance(status, int) and (response or error) else None
