"""`doctor`: each finding says what is wrong and what to do, and the exit code says whether a start would fail."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from baton.cluster import config_load, yaml_tree
from baton.cluster.doctor import threads as findings_of_threads
from baton.tests.harness.rig import merged, tiny_config


def doctor(tmp_path: Path, config: dict[str, object]) -> tuple[int, dict[str, str]]:
    """Exit code, and the finding of each subject (the worst one where there are several)."""
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "baton.cluster.cli", "doctor", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "Traceback" not in done.stderr
    found: dict[str, str] = {}
    for line in sorted(done.stdout.splitlines(), key=lambda text: text.startswith("fail")):
        found[line[5:].split(":")[0]] = line
    return done.returncode, found


def test_a_good_configuration_is_ok_in_every_point(tiny_dir: Path, tmp_path: Path) -> None:
    code, found = doctor(tmp_path, tiny_config(tiny_dir))
    assert code == 0, found
    assert set(found) == {"config", "model", "memory", "ports", "threads", "transport", "placement"}
    assert not [line for line in found.values() if line.startswith("fail")]


def test_a_taken_port_too_little_memory_and_missing_gpus_are_found_together(tiny_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        changes = {"router.http": address, "kv.memory": "900TiB", "pools.decode.device": "cuda"}
        config = merged(tiny_config(tiny_dir), changes)
        del config["pools"]["prefill"]["memory"]
        code, found = doctor(tmp_path, config)
    assert code == 1
    assert found["ports"].startswith(f"fail ports: router.http: {address}: Address already in use -> ")
    assert found["memory"].startswith("fail memory: ")
    assert "-> " in found["memory"]


@pytest.mark.parametrize(("there", "wrong"), [(True, "memory"), (False, "model")])
def test_a_draft_model_needs_memory_and_has_to_be_there(
    tiny_dir: Path, tmp_path: Path, there: bool, wrong: str
) -> None:
    draft = {"method": "draft", "draft_model": str(tiny_dir if there else tmp_path / "none"), "draft_memory": "900TiB"}
    changes = {f"engine.speculation.{key}": value for key, value in draft.items()}
    code, found = doctor(tmp_path, merged(tiny_config(tiny_dir), changes))
    assert code == 1
    said = "CPU ranks need 900.0 TiB in all" if there else "engine.speculation.draft_model: "
    assert found[wrong].startswith(f"fail {wrong}: {said}")


def test_files_of_tls_that_cannot_be_used_are_found_before_the_start(tiny_dir: Path, tmp_path: Path) -> None:
    for name in ("rank.pem", "rank.key", "ca.pem"):
        (tmp_path / name).write_text("no certificate")
    files = {"kv.transport": "auto", "kv.tls.certificate": "rank.pem", "kv.tls.key": "rank.key", "kv.tls.ca": "ca.pem"}
    code, found = doctor(tmp_path, merged(tiny_config(tiny_dir), files))
    assert code == 1
    assert found["transport"].startswith("fail transport: kv.tls: certificate ")


def test_a_missing_model_is_a_finding_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, tiny_config(tmp_path / "none"))
    assert code == 1
    assert found["model"].startswith("fail model: model.path")
    assert found["ports"].startswith("ok ")


@pytest.mark.parametrize(("threads", "advice"), [("auto", "use fewer replicas or ranks"), (64, "or threads: auto")])
def test_threads_auto_is_not_advised_where_it_is_set(threads: str | int, advice: str) -> None:
    text = (
        f"model: {{path: m}}\npools: {{prefill: {{replicas: 500, threads: {threads}}}, decode: {{threads: {threads}}}}}"
    )
    (finding,) = findings_of_threads(config_load.build(yaml_tree.parse(text, "c"), Path()))
    assert finding.level == "warn"
    assert finding.fix.endswith(advice)
