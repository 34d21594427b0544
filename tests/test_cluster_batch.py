"""`baton batch` against a real router: answered, refused and bad lines, retries, kills and interrupts, going on."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from baton.cluster import batch
from baton.cluster.batch import Job, pause_s, with_url
from baton.cluster.failures import CommandFailed
from baton.cluster.http_client import Broken, HttpConnection, Origin, Unreachable
from baton.proto import worker_pb2 as pb
from baton.proto.errors import ConfigError
from baton.tests.harness.router_rig import RouterRig, router_rig


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        yield rig


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    body = body or {"prompt": "abc"}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def job(folder: Path, lines: Sequence[str] = (), in_flight: int | None = 4, retry_failed: bool = False) -> Job:
    made = Job(folder / "in.jsonl", folder / "out.jsonl", in_flight, retry_failed)
    if lines:
        made.source.write_text("".join(lines))
    return made


def output(made: Job) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in made.target.read_bytes().splitlines()]


def origin(rig: RouterRig) -> Origin:
    return Origin.parse(f"http://{rig.addresses['http']}")


async def test_good_refused_and_bad_lines_and_what_a_second_run_does(
    rig: RouterRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    lines = [request("a"), "nonsense\n", "\n", chat, request("a"), request("refused", prompt="x", max_tokens=-1)]
    made = job(tmp_path, lines)
    assert await with_url(origin(rig), made) == 1
    out = output(made)
    by_id = {one["custom_id"]: one for one in out if one["error"] is None}
    assert len(out) == 5
    assert len({one["id"] for one in out}) == 5
    assert by_id["a"]["response"]["status_code"] == 200
    assert by_id["a"]["response"]["body"]["choices"][0]["text"] == "hello"
    assert by_id["a"]["response"]["request_id"].startswith("req-")
    assert by_id["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert by_id["refused"]["response"]["status_code"] == 400
    assert by_id["refused"]["response"]["body"]["error"]["param"] == "max_tokens"
    errors = [(one["custom_id"], one["error"]["code"], one["error"]["line"]) for one in out if one["error"]]
    assert sorted(errors, key=str) == [("a", "duplicate_custom_id", 5), (None, "invalid_line", 2)]
    assert "2 answered and 3 failed" in capsys.readouterr().err

    assert await with_url(origin(rig), made) == 1  # nothing is left, and there are errors
    assert output(made) == out
    assert "is in " in capsys.readouterr().err
    made.source.write_text("".join([*lines[:2], request("new"), *lines[2:]]))
    assert await with_url(origin(rig), made) == 1  # the numbers behind the new line are others now
    assert Counter(one["custom_id"] for one in output(made))["new"] == 1

    made = job(tmp_path, [request("a"), chat, request("refused"), request("new")], retry_failed=True)
    assert await with_url(origin(rig), made) == 0
    assert sorted(one["custom_id"] for one in output(made)) == ["a", "chat", "new", "refused"]
    assert all(one["response"]["status_code"] == 200 for one in output(made))


async def test_many_lines_run_at_a_time_but_no_more_than_asked_for(rig: RouterRig, tmp_path: Path) -> None:
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(rig.cluster["decode-0"].held))
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    made = job(tmp_path, [request(str(number)) for number in range(60)], in_flight=5)
    assert await with_url(origin(rig), made) == 0
    watching.cancel()
    assert 2 <= most <= 5
    assert {one["custom_id"] for one in output(made)} == {str(number) for number in range(60)}


# ---- services that fail ------------------------------------------------------------------------------------------

FINE = b'{"usage": {"completion_tokens": 3}}'
CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7;x=1\r\n{"usage\r\n5\r\n": {}\r\n1\r\n}\r\n0\r\n\r\n'


def reply(status: int, body: bytes = b"{}", *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def service(*replies: bytes) -> AsyncIterator[Origin]:
    """Sends the replies, one to each POST and nothing when there are no more, and then closes that connection."""
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, size = await reader.readline(), 0
        while (line := await reader.readline()).strip():
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        await reader.readexactly(size)
        writer.write(reply(200) if head.startswith(b"GET") else left.pop(0) if left else b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Origin.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_WAIT_S", 0.001)
    monkeypatch.setattr(batch, "_LONGEST_WAIT_S", 0.002)


@pytest.mark.usefixtures("hasty")
async def test_what_may_pass_is_tried_again_and_what_does_not_is_an_error(tmp_path: Path) -> None:
    for replies, status, code in (
        ([reply(429, b"{}", "retry-after: 1"), reply(503), b"", b"no\r\n", CHUNKED[:-9], FINE[:9], CHUNKED], 200, None),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + reply(200, FINE)], 200, None),
        ([CHUNKED], 200, None),
        ([b'HTTP/1.0 200 OK\r\n\r\n{"until": "the end"}'], 200, None),
        ([reply(500)], 500, None),
        ([reply(503)] * 20, 503, None),
        ([reply(200, b"<html>")], None, "no_json"),
        ([], None, "unavailable"),
    ):
        made = job(tmp_path, [request("a")])
        made.target.unlink(missing_ok=True)
        async with service(*replies) as place:
            assert await with_url(place, made) == (status != 200)
        (line,) = output(made)
        response, error = line["response"], line["error"]
        assert (response and response["status_code"], error and error["code"]) == (status, code), replies


@pytest.mark.usefixtures("hasty")
async def test_a_service_that_goes_away_ends_the_run_and_nothing_is_called_failed(tmp_path: Path) -> None:
    made = job(tmp_path, [request("a"), request("b")], in_flight=1)
    with pytest.raises(CommandFailed, match="does not answer"):
        await with_url(Origin.parse("http://127.0.0.1:1"), made)
    assert output(made) == []


def test_pauses_grow_keep_to_the_hint_and_have_an_end() -> None:
    assert [pause_s(attempt, 0.0, 0.0) for attempt in (1, 2, 3, 9)] == [0.5, 1.0, 2.0, 30.0]
    assert pause_s(1, 7.0, 0.0) == 7.0
    assert pause_s(1, 1e9, 0.5) == 37.5


async def test_a_connection_is_used_again_and_a_closed_one_replaced(rig: RouterRig) -> None:
    connection = HttpConnection(origin(rig))
    assert [(await connection.request("GET", "/v1/models")).status for _ in range(2)] == [200, 200]
    connection.close()
    assert (await connection.request("GET", "/v1/none")).status == 404
    connection.close()
    with pytest.raises(Unreachable):
        await HttpConnection(Origin.parse("http://127.0.0.1:1")).request("GET", "/")
    async with service() as place:
        with pytest.raises(Broken):
            await HttpConnection(place).request("POST", "/")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://", "http://h:x", "http://h?x=1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ValueError):
        Origin.parse(url)


def test_urls() -> None:
    texts = [str(Origin.parse(url)) for url in ("http://h/v1/", "https://[::1]:9/x/v1", "http://h:8000")]
    assert texts == ["http://h:80", "https://[::1]:9/x", "http://h:8000"]


def test_files_that_cannot_be_are_told_before_anything_starts(tmp_path: Path) -> None:
    made = job(tmp_path, [request("a")])
    for wrong, expected in (
        (Job(tmp_path / "none", made.target, None, False), "IN: .*none: No such file"),
        (Job(made.source, tmp_path / "no" / "out", None, False), "OUT: .*no is no folder"),
        (Job(made.source, made.source, None, False), "OUT: .* is also IN"),
    ):
        with pytest.raises(ConfigError, match=expected):
            wrong.check()


# ---- the command -------------------------------------------------------------------------------------------------


async def test_killed_and_interrupted_runs_add_up_to_one_answer_for_each_line(rig: RouterRig, tmp_path: Path) -> None:
    made = job(tmp_path, [request(str(number)) for number in range(100)])
    command = [sys.executable, "-m", "baton.cluster.cli", "batch", str(made.source), str(made.target)]
    command += ["--url", str(origin(rig)), "--in-flight", "2"]

    worker, turns = rig.cluster["decode-0"], asyncio.Semaphore(0)
    decode = worker.on_decode

    async def in_turn(leg: pb.Leg) -> None:
        await turns.acquire()
        await decode(leg)

    async def run(kind: signal.Signals, until: int) -> tuple[int | None, str]:
        """Ended when it has so many lines; no more are answered before that."""
        for _ in range(until - (made.target.read_bytes().count(b"\n") if made.target.exists() else 0)):
            turns.release()
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        while not made.target.exists() or made.target.read_bytes().count(b"\n") < until:
            await asyncio.sleep(0.005)
        process.send_signal(kind)
        _, err = await process.communicate()
        await rig.cluster.settled()  # what it had asked for takes no turn of the next run
        return process.returncode, err.decode()

    worker.on_decode = in_turn
    assert (await run(signal.SIGKILL, 10))[0] == -signal.SIGKILL
    torn = made.target.read_bytes()
    made.target.write_bytes(torn[: torn.rindex(b"\n") - 5])
    code, err = await run(signal.SIGINT, torn.count(b"\n") + 10)
    assert code == 1
    assert "run the same command again to go on\nbaton: interrupted\n" in err
    assert "Traceback" not in err
    worker.on_decode = decode
    assert await with_url(origin(rig), made) == 0
    assert Counter(one["custom_id"] for one in output(made)) == {str(number): 1 for number in range(100)}
    assert all(one["response"]["status_code"] == 200 for one in output(made))
