"""`pools.*.cores`: which cores each rank is given, and that all threads of a worker stay on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from baton.cluster import config_load, spec, yaml_tree
from baton.cluster.config import Config
from baton.cluster.doctor import threads as findings_of_threads
from baton.cluster.units import parse_cores, show_cores
from baton.proto.errors import ConfigError
from baton.tests.harness.rig import merged, running, tiny_config


def config(pools: str) -> Config:
    return config_load.build(yaml_tree.parse(f"model: {{path: m}}\npools: {{{pools}}}", "c"), Path())


@pytest.mark.parametrize(
    ("written", "cores", "shown"),
    [(3, (3,), "3"), ("0-3,8", (0, 1, 2, 3, 8), "0-3,8"), ("5,4", (5, 4), "5,4"), ("7-7", (7,), "7")],
)
def test_cores_are_written_as_for_taskset(written: object, cores: tuple[int, ...], shown: str) -> None:
    assert parse_cores(written) == cores
    assert show_cores(cores) == shown


@pytest.mark.parametrize("wrong", [True, -1, 1.0, "", "3-1", "0,0", "0-2,1", "all", [0, 1], "0-", "١"])
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_cores(wrong)


def test_each_rank_has_an_equal_share_and_as_many_threads() -> None:
    built = config("prefill: {replicas: 2, cores: 0-4}, decode: {tensor_parallel: 2, cores: '8-11', threads: 1}")
    builder = spec.SpecBuilder(built)
    workers = [(name, 0) for name in ("prefill-0", "prefill-1", "prefill-2")] + [("decode-0", 0), ("decode-0", 1)]
    specs = [builder.worker(name, "i", rank, "") for name, rank in workers]
    assert [one.cores for one in specs] == [(0, 1), (2, 3), (0, 1), (8, 9), (10, 11)]
    assert [one.params.engine.threads for one in specs] == [2, 2, 2, 1, 1]
    assert "prefill 2 (auto) on cores 0-4, decode 1 on cores 8-11;" in spec.threads_line(built)
    assert spec.SpecBuilder(config("")).worker("decode-0", "i", 0, "").cores == ()


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("{cores: 0-x}", "pools.decode.cores: is 0-x, but expected cores such as 3, 0-3 or 0-3,8"),
        ("{cores: '0,0'}", "pools.decode.cores: is 0,0, but expected each core once"),
        ("{cores: 2, replicas: 2}", "pools.decode.cores: is 2, but the pool has 2 ranks; give at least one core for"),
        ("{cores: 0-3, replicas: 2, threads: 3}", "pools.decode.threads: is 3, but each rank has 2 of the cores 0-3"),
    ],
)
def test_what_cannot_be_is_named(pool: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(f"decode: {pool}")
    assert str(caught.value).startswith(f"c:2: {expected}")


def test_the_doctor_names_cores_that_this_machine_lacks() -> None:
    (found, *_) = findings_of_threads(config("prefill: {cores: 1023}"))
    assert (found.level, found.text) == ("fail", "pools.prefill.cores: 1023 cannot be used on this machine")


def test_a_core_that_may_not_be_used_ends_a_rank_with_the_reason() -> None:
    code = (
        "import threading\nfrom pathlib import Path\n"
        "from baton.cluster import config_load, rank_runtime, spec, yaml_tree\n"
        "text = 'model: {path: m}\\npools: {decode: {cores: 1023}}'\n"
        "config = config_load.build(yaml_tree.parse(text, 'c'), Path())\n"
        "rank = spec.SpecBuilder(config).worker('decode-0', 'i', 0, '')\n"
        "rank_runtime.run_rank(rank, '127.0.0.1', print, threading.Event())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ConfigError: pools.decode.cores: cores [1023] are not among those available here" in done.stderr


def test_threads_from_before_and_after_are_bound() -> None:
    code = (
        "import os, threading, time\nfrom pathlib import Path\nfrom baton.cluster.processes import bind\n"
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
        "core = max(os.sched_getaffinity(0))\nbind([core])\n"
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
        "tasks = [int(task.name) for task in Path('/proc/self/task').iterdir()]\n"
        "print(len(tasks), {frozenset(os.sched_getaffinity(task)) for task in tasks} == {frozenset({core})})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "3 True\n"


@pytest.mark.slow
def test_every_thread_of_a_worker_stays_on_its_core(tiny_dir: Path, tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    wanted = {"prefill": usable[-1], "decode": usable[0]}
    changes = {f"pools.{role}.cores": core for role, core in wanted.items()}
    with running(tmp_path, merged(tiny_config(tiny_dir), changes)) as rig:
        rig.client.generate(token_ids=[1, 2, 3], max_tokens=4)
        for role, core in wanted.items():
            threads = [int(task.name) for task in Path(f"/proc/{rig.pid(f'{role}-0')}/task").iterdir()]
            assert {thread: os.sched_getaffinity(thread) for thread in threads} == {
                thread: {core} for thread in threads
            }
        assert os.sched_getaffinity(rig.router_pid()) == set(usable)
