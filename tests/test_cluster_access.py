"""The commands against a cluster that asks for keys, and one that speaks TLS."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from baton.cluster import bench
from baton.cluster.access import NOBODY, Access
from baton.cluster.batch import Job, with_url
from baton.cluster.bench_plan import Plan
from baton.cluster.bench_watch import watching
from baton.cluster.chat import Wanted
from baton.cluster.chat_remote import RemoteModel
from baton.cluster.config_workload import SLOSection, WorkloadSection
from baton.cluster.failures import KEY_HINT, CommandFailed
from baton.cluster.generate import with_address
from baton.cluster.http_client import Origin
from baton.cluster.requests_input import from_fields
from baton.cluster.tenants import make_key
from baton.proto.errors import ConfigError, Unauthenticated
from baton.router.params import TenantParams
from baton.router.tenants import key_hash
from baton.tests.harness.pki import authority
from baton.tests.harness.rig import merged, tiny_config
from baton.tests.harness.router_rig import RouterRig, router_rig
from baton.tests.harness.tied import tied

ALICE = TenantParams("alice", (key_hash("key-a"),), 1.0, None, None)
KEYED, WRONG = Access("key-a"), Access("key-x")
LINES = [from_fields({"prompt": "hi", "max_tokens": 8}, "f")]
WORKLOAD = WorkloadSection.model_validate({"prompt_tokens": {"mean": 8}, "output_tokens": {"mean": 4}})
PLAN = Plan(2, 0, None, 1, 0)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0", tenants=(ALICE,)) as rig:
        rig.http.headers.update(KEYED.headers)
        yield rig


def test_options_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for key in ("a b", "a\r\nx: y", "clé", "a\n"):
        with pytest.raises(ConfigError, match="--api-key or BATON_API_KEY"):
            Access.given(key, None)
    (tmp_path / "x.pem").write_text("nothing")
    for name in ("x.pem", "missing.pem"):
        with pytest.raises(ConfigError, match=rf"--tls-ca: .*{name}"):
            Access.given(None, tmp_path / name)
    assert Access.given("", None) == NOBODY


async def test_generate_bench_and_chat_show_their_key(rig: RouterRig, capsys: pytest.CaptureFixture[str]) -> None:
    address = rig.addresses["grpc"]

    def ask(access: Access) -> list[object]:
        with RemoteModel(address, access) as remote:
            return list(remote.answer([{"role": "user", "content": "hi"}], Wanted(8, 0.0, 1.0, 0)))

    assert await with_address(address, LINES, as_json=False, report=False, access=KEYED) == 0
    assert capsys.readouterr().out == "hello\n"
    assert await bench.with_address(address, SLOSection(), WORKLOAD, PLAN, True, KEYED) == 0
    assert "".join(piece for piece in await asyncio.to_thread(ask, KEYED) if isinstance(piece, str)) == "hello"
    for access in (NOBODY, WRONG):
        assert await with_address(address, LINES, as_json=False, report=False, access=access) == 1
        assert KEY_HINT in capsys.readouterr().err
        with pytest.raises(Unauthenticated):
            await bench.with_address(address, SLOSection(), WORKLOAD, PLAN, True, access)
        with pytest.raises(Unauthenticated):
            await asyncio.to_thread(ask, access)


async def test_batch_and_the_watch_show_their_key(rig: RouterRig, tmp_path: Path) -> None:
    origin = Origin.parse(f"http://{rig.addresses['http']}")
    made = Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", 1, False)
    made.source.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    for access in (NOBODY, WRONG):
        with pytest.raises(CommandFailed, match="BATON_API_KEY"):
            await with_url(origin, made, access)
        async with watching(access.connection(origin), 60.0) as watch:
            assert not watch.rows
    assert made.target.read_bytes() == b""
    assert await with_url(origin, made, KEYED) == 0
    async with watching(KEYED.connection(origin), 60.0) as watch:
        assert len(watch.rows) == 1


async def test_the_command_takes_its_key_from_the_environment(rig: RouterRig) -> None:
    command = [sys.executable, "-m", "baton.cluster.cli", "generate", "--address", rig.addresses["grpc"]]
    command += ["--prompt", "hi", "--max-tokens", "8"]

    def run(*more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
        )

    done = await asyncio.to_thread(run, BATON_API_KEY="key-a")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    refused = await asyncio.to_thread(run, "--api-key", "key-x", BATON_API_KEY="key-a")
    assert refused.returncode == 1
    assert KEY_HINT in refused.stderr


async def test_commands_speak_tls_with_an_authority(tmp_path: Path) -> None:
    files, ca, _ = authority(tmp_path / "pki")
    async with router_rig(tmp_path, "prefill-0", "decode-0", tls=files) as rig:
        access = Access.given(None, ca)
        port = rig.addresses["http"].rpartition(":")[2]
        assert await with_address(rig.addresses["grpc"], LINES, as_json=False, report=False, access=access) == 0
        connection = access.connection(Origin.parse(f"https://localhost:{port}"))
        assert (await connection.request("GET", "/v1/models")).status == 200
        connection.close()


def test_a_cluster_with_keys_and_tls_starts_and_answers_its_own_commands(tmp_path: Path, tiny_dir: Path) -> None:
    files, ca, _ = authority(tmp_path / "pki")
    key = make_key("alice", tmp_path / "tenants.yaml")
    front = {"certificate": files.certificate, "key": files.key}
    config = merged(tiny_config(tiny_dir), {"router.tls": front, "router.tenants": "tenants.yaml"})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "baton.cluster.cli", "generate", "--config", str(tmp_path / "c.yaml"), "--prompt"]
    command += ["hi", "--max-tokens", "3", "--tls-ca", str(ca), "--report"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "BATON_API_KEY": key}
    done = subprocess.run(tied(command), env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
