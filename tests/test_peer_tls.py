"""TLS within the cluster: files that do not fit are named at the start, and nobody without a certificate gets in."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from baton.cluster import admin
from baton.cluster.access import Access
from baton.cluster.failures import KEY_HINT
from baton.cluster.tenants import make_key
from baton.proto import control_pb2
from baton.proto import worker_pb2 as pb
from baton.proto.control_pb2_grpc import AdminStub, MembershipStub
from baton.proto.errors import ConfigError
from baton.proto.peer_tls import PeerTLS, blocking_channel, check
from baton.proto.worker_pb2_grpc import WorkerStub
from baton.tests.harness.pki import authority
from baton.tests.harness.rig import merged, running, tiny_config


def _files(folder: Path) -> PeerTLS:
    front, ca, _ = authority(folder)
    return PeerTLS(front.certificate, front.key, str(ca), "baton")


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    ours, theirs = _files(tmp_path / "ours"), _files(tmp_path / "theirs")
    check(ours)
    for wrong, said in (
        (replace(ours, name="other"), "'other'"),
        (replace(ours, ca=theirs.ca), "certificate verify failed"),
        (replace(ours, key=theirs.key), "with key"),
        (replace(ours, ca=str(tmp_path / "none")), "cluster.tls: ca"),
    ):
        with pytest.raises(ConfigError, match=r"cluster\.tls") as refused:
            check(wrong)
        assert said in str(refused.value)


def _status(channel: grpc.Channel, service: str, worker: str) -> grpc.StatusCode:
    """Of a call that has nothing to do with TLS, but for its connection."""
    stubs: dict[str, Any] = {"admin": AdminStub, "membership": MembershipStub, "worker": WorkerStub}
    stub = stubs[service](channel)
    try:
        if service == "admin":
            stub.Status(control_pb2.StatusRequest(), timeout=20)
        elif service == "membership":
            next(stub.Watch(control_pb2.WatchRequest(router_id="x"), timeout=20))
        else:
            hello = pb.RouterCommand(hello=pb.Hello(router_id="x", worker_id=worker, worker_incarnation="none"))
            next(stub.Session(iter([pb.RouterMessage(commands=[hello])]), timeout=20))
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def test_a_cluster_whose_processes_prove_themselves(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, strangers = _files(tmp_path / "pki"), _files(tmp_path / "strangers")
    shutil.copy(files.ca, tmp_path / "cluster-ca.pem")
    (tmp_path / "cluster").mkdir()
    section = {"certificate": files.certificate, "key": files.key, "ca": "../cluster-ca.pem"}
    access = Access(make_key("alice", tmp_path / "cluster" / "tenants.yaml"))
    config = merged(tiny_config(tiny_dir), {"cluster.tls": section, "router.tenants": "tenants.yaml"})
    with running(tmp_path / "cluster", config, checks=False) as rig:
        body = {"model": "tiny-llama", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{rig.http}/v1/completions", json=body, headers=dict(access.headers), timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 4
        request_id = answer.headers["x-request-id"]
        assert admin.show_story(rig.admin, request_id, False, files, access) == 0
        assert request_id in capsys.readouterr().out
        assert admin.show_story(rig.admin, request_id, False, files) == 1
        assert KEY_HINT in capsys.readouterr().err
        assert admin.show_status(rig.admin, True, files) == 0
        workers = json.loads(capsys.readouterr().out)["workers"]
        assert {worker["state"] for worker in workers} == {"ready"}
        assert admin.show_status(rig.admin, True) == 1
        assert "no admin service answers" in capsys.readouterr().err
        doors = [("admin", rig.admin, ""), ("membership", rig.admin, "")]
        doors += [("worker", worker["address"], worker["worker_id"]) for worker in workers]
        anonymous = grpc.ssl_channel_credentials(Path(files.ca).read_bytes())
        named = [("grpc.ssl_target_name_override", "baton")]
        for service, address, worker in doors:
            with blocking_channel(address, files) as ours:
                inside = grpc.StatusCode.FAILED_PRECONDITION if service == "worker" else grpc.StatusCode.OK
                assert _status(ours, service, worker) == inside  # another incarnation, says the worker itself
            with blocking_channel(address, replace(strangers, ca=files.ca)) as theirs:
                assert _status(theirs, service, worker) == grpc.StatusCode.UNAVAILABLE
            with grpc.secure_channel(address, anonymous, options=named) as nobody:
                assert _status(nobody, service, worker) == grpc.StatusCode.UNAVAILABLE
            with grpc.insecure_channel(address) as plain:
                assert _status(plain, service, worker) == grpc.StatusCode.UNAVAILABLE
