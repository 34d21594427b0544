"""DR-03: threads = cores that may be used / ranks, whatever the host has; logged at start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from baton.cluster import config_load, processes, spec, yaml_tree


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1), (2, 2, 1), (1, 1, 1), (0, 4, 4)]
)
def test_cores_are_shared_by_the_ranks(ranks: int, cores: int, expected: int) -> None:
    assert processes.threads_per_rank(ranks, cores) == expected


def test_affinity_counts_and_the_hosts_cores_do_not() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from baton.cluster.processes import available_cores; print(available_cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"


def test_a_cpu_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(processes, "cgroup_quota", lambda: 2.5)
    assert processes.available_cores() == 2
    monkeypatch.setattr(processes, "cgroup_quota", lambda: 0.5)
    assert processes.available_cores() == 1
    monkeypatch.setattr(processes, "cgroup_quota", lambda: None)
    assert processes.available_cores() == 16


def test_the_tightest_quota_of_the_control_groups_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (inner / "cpu.max").write_text("400000 100000\n")
    assert processes.cgroup_quota(tmp_path, "a/b") == 1.5
    assert processes.cgroup_quota(tmp_path / "a" / "none", "") is None


def test_both_pools_get_their_share_and_a_number_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "available_cores", lambda: 12)
    text = "model: {path: m}\npools: {prefill: {replicas: 2}, decode: {tensor_parallel: 2, threads: 5}}"
    config = config_load.build(yaml_tree.parse(text, "c.yaml"), Path())
    assert config.ranks == 4
    assert (spec.threads(config, "prefill"), spec.threads(config, "decode")) == (3, 5)


def test_the_choice_is_logged_once_per_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "available_cores", lambda: 2)
    config = config_load.build(yaml_tree.parse("model: {path: m}\npools: {decode: {threads: 3}}", "c.yaml"), Path())
    assert spec.threads_line(config) == "threads per rank: prefill 1 (auto), decode 3; 2 cores, 2 ranks"
