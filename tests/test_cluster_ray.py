"""The same cluster on Ray: actors in placement groups, restarted by the controller, with nothing left at the end.

All tests that start Ray are here: two Rays that start at once on a machine can get into each other's way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from baton.tests.harness import oracles
from baton.tests.harness.client import Client
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tied import tied

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import asyncio, json, os, signal
from pathlib import Path
from baton.cluster import config_load, ray_environment, spec, yaml_tree
from baton.cluster.output import keep_stdout, say
keep_stdout()
ray_environment.prepare("local")
from baton.cluster.launcher import PlacementFailed
from baton.cluster.launcher_ray import RayLauncher, actor_options

def rank(path):
    text = f"model: {{path: {path}, dtype: float32}}\\nkv: {{memory: 1MiB}}"
    config = config_load.build(yaml_tree.parse(text, "c"), Path())
    return spec.SpecBuilder(config).worker("decode-0", "inc", 0, "")

async def main(model):
    seen = {}
    launcher = RayLauncher("local", 1.0)
    await launcher.open()
    slots = [await launcher.reserve(f"w-{n}", 2, "cpu") for n in range(4)]  # 8 ranks on whatever cores there are
    seen["options"] = {k: v for k, v in actor_options(slots[0], 1).items() if k != "scheduling_strategy"}
    try:
        await launcher.reserve("prefill-0", 2, "cuda")
    except PlacementFailed as error:
        seen["short"] = str(error)
    ready = asyncio.Queue()
    lives = await launcher.start(slots[0], rank(model), lambda kind, fields: ready.put_nowait((kind, fields)))
    while (report := await ready.get())[0] != "ready":
        pass
    seen["other process"] = report[1]["pid"] != os.getpid()
    seen["loopback"] = report[1]["address"].startswith("127.0.0.1:")
    os.kill(report[1]["pid"], signal.SIGKILL)
    async with asyncio.timeout(30):
        seen["killed"] = await lives.wait()
    broken = await launcher.start(slots[1], rank("/nowhere"), lambda kind, fields: None)
    async with asyncio.timeout(30):
        seen["failed"], seen["config"] = (await broken.wait())[:24], broken.config_error
    await broken.stop(1)
    for slot in slots:
        await launcher.release(slot)
    await launcher.close()
    say(json.dumps(seen))

import sys
asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder with a short name: Ray's sockets lie deep below it."""
    path = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def test_dr_02_placement_actors_and_their_ends(tiny_dir: Path, temporary: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny_dir)]
    environment = os.environ | {"TMPDIR": str(temporary), "GRPC_ENABLE_FORK_SUPPORT": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen.pop("short") == (
        "prefill-0 was not placed within 1 s: it needs 2 x GPU on one node; the largest of 1 nodes has 0, "
        "and 0 of 0 in the cluster are free"
    )
    assert seen == {
        "options": {
            "num_cpus": 0,
            "num_gpus": 0,
            "resources": {"baton_rank": 1.0},
            "max_restarts": 0,
            "max_concurrency": 4,
        },
        "other process": True,
        "loopback": True,
        "killed": "its process died",
        "failed": "model.path: '/nowhere' i",
        "config": True,
    }
    assert list(temporary.iterdir()) == []


LOCATE = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
@ray.remote
def locate():
    import proto, kernels, baton
    return [proto.__file__, kernels.__file__, baton.__file__]
print(*ray.get(locate.remote()))
ray.shutdown()
"""


def test_foreign_proto_and_kernels_import_in_ray_workers(temporary: Path) -> None:
    """Ray puts the driver's working directory first on each worker's path."""
    command, environment = [sys.executable, "-c", LOCATE], os.environ | {"TMPDIR": str(temporary)}
    found = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    proto_file, kernels_file, ours = found.stdout.split()
    assert "site-packages" in proto_file
    assert "site-packages" in kernels_file
    assert Path(ours).samefile(ROOT / "__init__.py")


def ray_config(model: Path) -> dict[str, object]:
    return merged(tiny_config(model), {"cluster.launcher": "ray"})


def test_cf_09_a_killed_actor_is_restarted_and_the_stop_leaves_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    with running(tmp_path, ray_config(tiny_dir)) as rig:
        first = rig.client.generate(60, token_ids=[1, 2, 3], max_tokens=6, temperature=0, ignore_eos=True)
        for worker in ("prefill-0", "decode-0"):
            before = rig.workers()[worker]
            rig.kill_worker(worker)
            rig.wait_live()
            after = rig.workers()[worker]
            assert after["incarnation"] != before["incarnation"]
            assert after["restarts"] == 1
        again = rig.client.generate(60, token_ids=[1, 2, 3], max_tokens=6, temperature=0, ignore_eos=True)
        assert again.token_ids == first.token_ids


@pytest.mark.parametrize(
    ("victim", "launcher"),
    [
        ("driver", "ray"),
        ("warden", "process"),
        pytest.param("driver", "process", marks=pytest.mark.slow),
        pytest.param("warden", "ray", marks=pytest.mark.slow),
    ],
)
def test_kill_9_of_the_serving_parent_leaves_no_process_port_or_file(
    tiny_dir: Path, tmp_path: Path, temporary: Path, victim: str, launcher: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(merged(tiny_config(tiny_dir), {"cluster.launcher": launcher})))
    command = tied([sys.executable, "-m", "baton.cluster.cli", "serve", str(path)])
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready: ")
        before = oracles.footprint(process.pid)
        assert list(temporary.iterdir())
        driver = psutil.Process(process.pid).children()[0].pid
        os.kill(process.pid if victim == "warden" else driver, signal.SIGKILL)
        process.wait(40)
        oracles.check_processes(before)
        deadline = time.monotonic() + 40
        while list(temporary.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.slow),
        ("process", signal.SIGTERM),
        pytest.param("process", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_lets_live_streams_finish_and_ends_everything_quietly(
    tiny_dir: Path, tmp_path: Path, launcher: str, kind: signal.Signals
) -> None:
    changes = {"cluster.launcher": launcher, "pools.decode.tensor_parallel": 2, "cluster.stop_grace": "10s"}
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(merged(tiny_config(tiny_dir), changes)))
    command = [sys.executable, "-m", "baton.cluster.cli", "serve", str(path)]
    slow = os.environ | {"BATON_FAILPOINTS": "decode.step=sleep(0.02)"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=slow) as process:
        try:
            assert process.stdout is not None
            ready = re.search(r"grpc (\S+),", process.stdout.readline())
            assert ready is not None
            client = Client(ready[1])
            stream = client.stream(60, token_ids=[1, 2, 3], max_tokens=60, temperature=0, ignore_eos=True)
            stream.until_tokens(3)
            before = oracles.footprint(process.pid)
            process.send_signal(kind)
            assert len(stream.rest().token_ids) == 60
            client.close()
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            oracles.check_processes(before)
        finally:
            process.kill()
    lines = err.splitlines()
    assert lines[0].startswith("threads per rank: ")
    assert lines[1:] == ["stopping (again: at once)", "stopped"]


def test_a_taken_port_is_exit_1_and_named(tiny_dir: Path, tmp_path: Path) -> None:
    with running(tmp_path / "first", tiny_config(tiny_dir)) as rig:

        def serve(name: str, address: str) -> None:
            path = tmp_path / f"{name}.yaml"
            path.write_text(json.dumps(merged(tiny_config(tiny_dir), {f"router.{name}": address})))
            command = [sys.executable, "-m", "baton.cluster.cli", "serve", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stdout) == (1, "")
            assert f"router.{name}" in done.stderr
            assert address in done.stderr
            assert f"--set router.{name}=127.0.0.1:0" in done.stderr
            assert done.stderr.count("\n") == 1

        taken = {"grpc": rig.grpc, "http": rig.http.removeprefix("http://"), "admin": rig.admin}
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(serve, taken, taken.values()))


def test_serve_status_scale_and_drain_on_real_workers(tiny_dir: Path, tmp_path: Path) -> None:
    def baton(rig: Rig, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "baton.cluster.cli", *arguments, "--address", rig.admin]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    with running(tmp_path, tiny_config(tiny_dir)) as rig:
        assert "KV capacity 128 tokens, at most 16 sequences at a time" in rig.output
        assert baton(rig, "scale", "decode", "2").stdout == "decode: 1 -> 2 workers (decode-0, decode-1)\n"
        deadline = time.monotonic() + 60
        while rig.workers().get("decode-1", {}).get("state") != "ready":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "decode-0 is drained and stopped" in baton(rig, "drain", "decode-0").stdout
        rig.wait_live()
        table = baton(rig, "status").stdout
        decode = rig.workers()["decode-1"]
        for whole in ("decode-1", decode["address"], decode["incarnation"], f"{decode['pid']} @ {decode['node']}"):
            assert whole in table
        assert "decode-0" not in table
        wrong = baton(rig, "generate", "--prompt", "x")
        assert wrong.returncode == 1
        assert f"{rig.admin} is not the gRPC port of a router (router.grpc)" in wrong.stderr
        refused = baton(rig, "drain", "decode-1")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "the only ready decode worker" in refused.stderr
        assert "cannot change its role" in baton(rig, "role", "decode-1", "prefill").stderr
