"""The batch format: lines to calls, outcomes to lines, and an output file that any kill leaves ready to go on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from baton.cluster.batch_progress import Tally, duration
from baton.proto.errors import ConfigError
from baton.text import batch_lines
from baton.text.batch_lines import BadLine, Call, Duplicate, answered, known, numbered, read_call, unanswered
from baton.text.batch_output import BatchOutput


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return {**fields, **changes}


def test_a_line_becomes_a_call() -> None:
    call = read_call(7, json.dumps(line("é")).encode())
    assert (call.number, call.custom_id, call.url) == (7, "é", "/v1/completions")
    assert json.loads(call.body) == {"prompt": "x"}


@pytest.mark.parametrize(
    ("raw", "custom_id", "expected"),
    [
        ("nonsense", None, "not JSON"),
        ("[1]", None, "expected an object with custom_id, method, url, body"),
        (b"\xff", None, "not UTF-8"),
        (line(custom_id=""), None, "custom_id: must be a text"),
        (line(custom_id=5), None, "custom_id: must be a text"),
        (line(method="GET"), "a", "method: must be POST"),
        (line(url="/v1/embeddings"), "a", "url: must be /v1/chat/completions or /v1/completions"),
        (line(body="x"), "a", "body: must be an object"),
        (line(body={"prompt": "x", "stream": True}), "a", "body.stream: the answers of a batch come whole"),
        (line(bodyy={}), "a", "bodyy: unknown field; did you mean body?"),
        (line(body={"prompt": "\ud800"}), None, "body: not valid Unicode text"),
    ],
)
def test_a_bad_line_is_named(raw: Any, custom_id: str | None, expected: str) -> None:
    raw = json.dumps(raw) if isinstance(raw, dict) else raw
    with pytest.raises(BadLine) as caught:
        read_call(3, raw if isinstance(raw, bytes) else raw.encode())
    assert (caught.value.number, caught.value.custom_id) == (3, custom_id)
    assert expected in str(caught.value)


def test_lines_are_numbered_blank_ones_passed_over_and_long_ones_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE", 8)
    raw = b"12345678\n\n  \n" + b"x" * 30 + b"\nshort\n123456789\nlast"
    found = list(numbered(io.BytesIO(raw)))
    assert found == [(1, b"12345678\n"), (4, b"x" * 9), (5, b"short\n"), (6, b"123456789"), (7, b"last")]
    with pytest.raises(BadLine, match="longer than"):
        read_call(4, found[1][1])


def outcomes() -> list[dict[str, Any]]:
    call = Call(1, "é1", "/v1/completions", b"")
    return [
        answered(call, 200, "req-1", {"choices": []}),
        unanswered(2, None, "invalid_line", "not JSON"),
        answered(Call(3, "c", "/v1/completions", b""), 400, "", {"error": {}}),
        batch_lines.bad(Duplicate(4, "é1", "again")),
    ]


def test_what_an_output_holds() -> None:
    found = known([json.dumps(one).encode() + b"\n" for one in outcomes()], "out")
    assert (found.ids, found.numbers, found.answered, found.failed) == ({"é1", "c"}, {2, 4}, 1, 3)
    assert found.has(Call(9, "c", "", b""))
    assert not found.has(Call(2, "new", "", b""))  # a good line is never passed over for its number
    assert found.has(BadLine(2, None, ""))
    assert found.has(Duplicate(4, "é1", ""))
    assert not found.has(Duplicate(5, "é1", ""))


def test_a_duplicate_in_the_output_does_not_stand_for_the_line_that_it_repeats() -> None:
    found = known([json.dumps(outcomes()[3]).encode() + b"\n"], "out")
    assert not found.has(Call(1, "é1", "", b""))


def test_a_kill_at_any_byte_leaves_an_output_that_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in outcomes())
    ends = {position for position, byte in enumerate(whole) if byte == ord("\n")}
    for cut in sorted({0, *range(1, len(whole), 29), *ends, *(end + 1 for end in ends), *(end - 1 for end in ends)}):
        path.write_bytes(whole[:cut])
        output = BatchOutput.open(path, drop_failed=False)
        output.add(unanswered(9, "next", "x", "y"))
        output.close()
        lines = path.read_bytes().splitlines(keepends=True)
        kept = whole[:cut].count(b"\n") + (whole[cut : cut + 1] == b"\n")
        assert b"".join(lines[:-1]) == b"".join(whole.splitlines(keepends=True)[:kept])
        assert json.loads(lines[-1])["custom_id"] == "next"


@pytest.mark.parametrize("text", ["notes", '{"custom_id": "a"}\n', "\n", json.dumps(line()) + "\n", '{"id": "other'])
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"out\.jsonl:1: not a line of a batch's output"):
        BatchOutput.open(path, drop_failed=True)
    assert path.read_text() == text


def test_one_run_at_a_time_and_failed_lines_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = BatchOutput.open(path, drop_failed=False)
    for one in outcomes():
        output.add(one)
    with pytest.raises(ConfigError, match="another batch is writing it"):
        BatchOutput.open(path, drop_failed=False)
    output.close()
    output = BatchOutput.open(path, drop_failed=True)
    assert (output.known.ids, output.known.failed) == ({"é1"}, 0)
    with pytest.raises(ConfigError, match="another batch is writing it"):
        BatchOutput.open(path, drop_failed=False)
    output.close()
    assert [json.loads(raw)["custom_id"] for raw in path.read_bytes().splitlines()] == ["é1"]
    with pytest.raises(ConfigError, match="Is a directory"):
        BatchOutput.open(tmp_path, drop_failed=False)


def test_the_pace_is_that_of_this_run() -> None:
    tally = Tally(total=100, started_s=10.0, skipped=40)
    assert tally.text(20.0) == "40 of 100 lines, 40 from before, 0.0 tokens/s, - left"
    tally.answered, tally.failed, tally.tokens = 18, 2, 5000
    assert (tally.tokens_per_s(20.0), tally.left_s(20.0)) == (500.0, 20.0)
    assert tally.text(20.0) == "60 of 100 lines, 40 from before, 2 failed, 500.0 tokens/s, 20 s left"
    assert [duration(seconds) for seconds in (0, 59.4, 187, 7500)] == ["0 s", "59 s", "3:07 min", "2:05 h"]
