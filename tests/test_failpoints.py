"""BATON_FAILPOINTS: the grammar, the actions, and one list of points that agrees with the code."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from baton.proto import failpoints
from baton.proto.errors import ConfigError, InternalError
from baton.tests.harness.gates import Gates

ROOT = Path(__file__).resolve().parent.parent

Use = Callable[..., None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Use:
    """Arms points in this process."""

    def arm(text: str, process: str = "") -> None:
        monkeypatch.setattr(failpoints, "_RULES", failpoints.parse(text))
        monkeypatch.setattr(failpoints, "_GATES", tmp_path)
        monkeypatch.setattr(failpoints, "_process", process)

    return arm


def test_every_point_is_reached_somewhere_and_every_call_is_listed() -> None:
    called: set[str] = set()
    for path in ROOT.glob("*/*.py"):
        if path.parent.name not in ("tests", "benchmarks"):
            text = path.read_text()
            called |= set(re.findall(r"\b(?:reach|reach_async|dial|armed|_pass_gate)\(\s*\"([\w.]+)\"", text))
    assert called == set(failpoints.POINTS)


def test_the_documentation_lists_every_point() -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    assert [point for point in failpoints.POINTS if f"`{point}`" not in text] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode.amdit=exit", "no point 'decode.amdit'; did you mean decode.admit?"),
        ("prefill.frame=exti", "no action 'exti'; did you mean exit?"),
        ("prefill.frame=sleep(soon)", "no action 'sleep(soon)'; did you mean sleep(S)?"),
        ("prefill.frame=sleep", "did you mean sleep(S)?"),
        ("prefill.frame=exit*0", "no action 'exit*0'"),
        ("prefill.frame=exit(3)", "no action 'exit(3)'"),
        ("prefill.frame", "is not point=action"),
        ("decode.step=corrupt", "decode.step cannot corrupt; only decode.payload can"),
        ("decode.step=via(127.0.0.1:1)", "only kv.dial can"),
        ("kv.dial=exit", "kv.dial cannot exit; it takes via(HOST:PORT)"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        failpoints.parse(text)


def test_a_mistake_ends_a_command_before_anything_starts() -> None:
    environment = {**os.environ, "BATON_FAILPOINTS": "prefil.chunk=exit"}
    command = [sys.executable, "-m", "baton.cluster.main", "serve", "nowhere.yaml"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "did you mean prefill.chunk?" in ended.stderr


def test_limits_and_processes(use: Use) -> None:
    use("decode.step=raise@3;decode.frame=raise*2;decode.admit[decode-1]=raise;decode.payload=corrupt", "decode-0")
    seen = []
    for point in ("decode.step", "decode.frame", "decode.admit"):
        for _ in range(4):
            try:
                seen.append(failpoints.reach(point))
            except InternalError:
                seen.append(True)
    assert seen == [False, False, True, False] + [True, True, False, False] + [False] * 4
    assert failpoints.reach("decode.payload")
    assert failpoints.armed("decode.step")
    assert not failpoints.armed("decode.admit")
    use("decode.admit[decode-0.1]=raise;decode.admit[decode-0]=sleep(0)", "decode-0.1")
    with pytest.raises(InternalError):
        failpoints.reach("decode.admit")


def test_gates_hold_and_say_who_stands_there(use: Use, tmp_path: Path) -> None:
    use("decode.step=gate", "decode-1")
    gates = Gates(tmp_path, {"decode.step": "gate"})
    failpoints.reach("decode.step")  # open
    assert not gates.reached("decode.step")
    gates.close("decode.step", "decode-0")
    failpoints.reach("decode.step")  # closed for another
    for process in ("", "decode-1"):
        gates.close("decode.step", process)
        thread = threading.Thread(target=failpoints.reach, args=("decode.step",))
        thread.start()
        assert gates.wait_reached("decode.step") == (os.getpid(), "decode-1")
        assert thread.is_alive()
        gates.release("decode.step")
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(ValueError, match=r"decode\.frame is no gate"):
        gates.close("decode.frame")


def test_one_at_a_time_and_on_request(use: Use, tmp_path: Path) -> None:
    use("decode.step=gate;decode.payload=corrupt?;decode.frame=raise?")
    gates = Gates(tmp_path, {"decode.step": "gate", "decode.payload": "corrupt?", "decode.frame": "raise?"})
    gates.close("decode.step")
    passed: list[int] = []

    def go() -> None:
        for number in range(3):
            failpoints.reach("decode.step")
            passed.append(number)

    thread = threading.Thread(target=go)
    thread.start()
    for count in range(3):
        gates.wait_reached("decode.step")
        assert len(passed) == count
        gates.let_one("decode.step")
    thread.join(30)
    assert len(passed) == 3
    assert not failpoints.reach("decode.payload")
    gates.close("decode.payload")
    assert failpoints.reach("decode.payload")
    gates.release("decode.payload")
    assert not failpoints.reach("decode.payload")


async def test_a_gate_on_an_event_loop_holds_only_its_caller(use: Use, tmp_path: Path) -> None:
    use("router.handoff=gate")
    gates = Gates(tmp_path, {"router.handoff": "gate"})
    gates.close("router.handoff")
    waiting = asyncio.create_task(failpoints.reach_async("router.handoff"))
    while not gates.reached("router.handoff"):
        await asyncio.sleep(0.001)
    gates.release("router.handoff")
    await asyncio.wait_for(waiting, 30)
    use("router.handoff=raise")
    with pytest.raises(InternalError):
        await failpoints.reach_async("router.handoff")


@pytest.mark.parametrize("action", ["exit", "stop"])
def test_a_process_ends_or_freezes(action: str) -> None:
    code = "from baton.proto.failpoints import reach; reach('decode.step'); print('on')"
    environment = {**os.environ, "BATON_FAILPOINTS": f"decode.step[decode-7]={action}", "BATON_WORKER": "decode-7"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        if action == "stop":
            deadline = time.monotonic() + 30
            while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == ((137, "") if action == "exit" else (0, "on\n"))


def test_without_the_variable_nothing_is_looked_at() -> None:
    assert failpoints._RULES == {}
    assert not failpoints.reach("no.such.point")
