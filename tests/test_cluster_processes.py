"""Children, launcher and warden: reports arrive, ends are noticed, and no process outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from baton.cluster import processes
from baton.cluster.child import Child
from baton.cluster.launcher import PlacementFailed
from baton.cluster.launcher_process import ProcessLauncher

FAKE = (sys.executable, str(Path(__file__).parent / "harness" / "fake_rank.py"))
SPEC = {"rank": 0, "leader": ""}
Reports = list[tuple[str, dict[str, Any]]]


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def start(mode: str, reports: Reports) -> Child:
    return await Child.spawn(FAKE, SPEC, lambda kind, fields: reports.append((kind, fields)), {"BATON_FAKE_RANK": mode})


def ready(reports: Reports) -> bool:
    return any(kind == "ready" for kind, _ in reports)


async def test_reports_arrive_in_order_and_prints_do_not_disturb_them() -> None:
    reports: Reports = []
    child = await start("", reports)
    await until(lambda: ready(reports))
    assert [kind for kind, _ in reports] == ["channel", "loading", "ready"]
    assert reports[2][1]["pid"] == child.pid
    await child.stop(10)
    assert await child.wait() == ""
    assert not psutil.pid_exists(child.pid)


@pytest.mark.parametrize(
    ("mode", "reason", "config_error"),
    [
        ("fail", "the fake rank failed", False),
        ("config", "model.path: a mistake", True),
        ("exit", "exit code 7", False),
    ],
)
async def test_each_end_has_its_reason(mode: str, reason: str, config_error: bool) -> None:
    child = await start(mode, [])
    async with asyncio.timeout(20):
        assert await child.wait() == reason
    assert child.config_error is config_error


async def test_kill_9_is_noticed_and_named() -> None:
    reports: Reports = []
    child = await start("", reports)
    await until(lambda: ready(reports))
    os.kill(child.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await child.wait() == "killed by SIGKILL"
    await child.stop(1)  # nothing to do


async def test_who_does_not_stop_is_killed_after_the_grace() -> None:
    reports: Reports = []
    child = await start("stubborn", reports)
    await until(lambda: ready(reports))
    started = time.monotonic()
    await child.stop(0.3)
    assert time.monotonic() - started < 15
    assert await child.wait() == "killed by SIGKILL"


async def test_gpu_ranks_get_one_device_each_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    launcher = ProcessLauncher(FAKE)
    first = await launcher.reserve("decode-0", 2, "cuda")
    assert first.devices == ("3", "5")
    with pytest.raises(PlacementFailed, match="prefill-0 needs 2 GPUs, but only 1 are free"):
        await launcher.reserve("prefill-0", 2, "cuda")
    await launcher.release(first)
    assert len((await launcher.reserve("prefill-0", 2, "cuda")).devices) == 2
    assert (await launcher.reserve("decode-1", 8, "cpu")).devices == ()


# ---- a parent's death ----------------------------------------------------------------------------------------

PARENT = f"""
import asyncio, sys
from baton.cluster.child import Child
async def start():
    ready = asyncio.Event()
    child = await Child.spawn({FAKE!r}, {SPEC!r}, lambda kind, fields: kind == "ready" and ready.set())
    await ready.wait()
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(start())
"""


def gone(pids: list[int], within_s: float) -> list[int]:
    """Which of the processes still live after that time at most."""
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        parent.wait()
        assert gone([child], 20) == []


def test_a_process_that_is_tied_to_a_test_dies_with_it() -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = (
        "import subprocess, sys, time; from baton.tests.harness.tied import tied\n"
        f"subprocess.Popen(tied([sys.executable, '-c', {child!r}]), start_new_session=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait()
        assert gone([pid], 20) == []


DRIVER = """
import os, subprocess, sys, tempfile, threading
from baton.cluster import driver, output
code = driver.supervise_if_needed()
if code is not None:
    sys.exit(code)
daemon = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
middle = f"import subprocess, sys; daemon = subprocess.Popen([sys.executable, '-c', {daemon!r}], stdout=-1, text=True)"
middle += "; print(daemon.stdout.readline(), end='', flush=True)"
subprocess.run([sys.executable, "-c", middle], stdout=output.stream())  # leaves an orphan in a session of its own
folder = tempfile.mkdtemp()
output.say(f"driver {os.getpid()} {folder}")
sys.exit(int(sys.argv[1])) if sys.argv[1:] else threading.Event().wait()
"""


class Warded:
    """A driver under its warden, with a daemon below that has left its session and lost its parent."""

    def __init__(self, script: Path, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        try:
            self.daemon = int(self.process.stdout.readline())
            _, pid, folder = self.process.stdout.readline().split()
        except ValueError:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            raise
        self.driver, self.folder = int(pid), Path(folder)
        self.all = [self.process.pid, self.driver, self.daemon]

    def check_clean(self, within_s: float) -> None:
        self.process.wait(within_s)
        assert gone(self.all, within_s) == []
        deadline = time.monotonic() + within_s
        while self.folder.parent.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not self.folder.parent.exists()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "driver.py"
    # the warden starts `-m baton.cluster.cli` with our arguments; here the driver is this script
    path.write_text(
        "import sys\nfrom baton.cluster import warden\n"
        "original = warden.supervise\n"
        "warden.supervise = lambda command: original([sys.executable, *sys.argv])\n" + DRIVER
    )
    return path


@pytest.fixture
def warded(script: Path) -> Iterator[Warded]:
    running = Warded(script)
    yield running
    for pid in running.all:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    running.process.wait()
    if running.process.stdout is not None:
        running.process.stdout.close()


@pytest.mark.parametrize("victim", ["warden", "driver"])
def test_kill_9_of_warden_or_driver_leaves_nothing(warded: Warded, victim: str) -> None:
    os.kill(warded.process.pid if victim == "warden" else warded.driver, signal.SIGKILL)
    warded.check_clean(30)
    assert warded.process.returncode == (-9 if victim == "warden" else 1)


def test_an_interrupt_reaches_the_driver_once_and_nothing_is_left(warded: Warded) -> None:
    warded.process.send_signal(signal.SIGINT)
    warded.check_clean(30)
    assert warded.process.returncode == 1


def test_a_driver_whose_warden_is_gone_before_it_attached_ends_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    code = "from baton.cluster import driver; driver.supervise_if_needed(); print('went on')"
    environment = os.environ | {"BATON_WARDEN": f"1:0:{folder}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert not folder.exists()


@pytest.mark.parametrize("code", [0, 2])
def test_the_drivers_exit_code_is_the_wardens(script: Path, code: int) -> None:
    running = Warded(script, str(code))
    running.check_clean(30)
    assert running.process.returncode == code
    assert running.process.stdout is not None
    running.process.stdout.close()


def test_descendants_are_found_at_any_depth() -> None:
    sleep = "import time; print(1, flush=True); time.sleep(60)"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    with subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        found = processes.descendants(os.getpid())
        children = [child.pid for child in psutil.Process(parent.pid).children()]
        assert {parent.pid, *children} <= set(found)
        for pid in [*children, parent.pid]:
            os.kill(pid, signal.SIGKILL)


HEADLESS = """
import ctypes, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
threading.Thread(target=time.sleep, args=(60,)).start()
print(child.pid, flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_children_of_a_process_whose_first_thread_has_ended_are_found() -> None:
    """It is a zombie already, while its other threads live on and it keeps its children."""
    parent = subprocess.Popen([sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        deadline = time.monotonic() + 30
        while psutil.Process(parent.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = processes.descendants(os.getpid())
        assert child in found
        assert parent.pid not in found
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.wait()
        parent.stdout.close()
