"""The gateways' port of a worker has the keys, the rates and the TLS of the router's front door."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from baton.cluster.access import Access
from baton.proto import worker_pb2 as pb
from baton.router.params import TenantParams
from baton.router.tenants import ANYBODY, key_hash, salted
from baton.tests.harness.pki import authority
from baton.tests.harness.router_rig import FakeCluster, router_params, write_model
from baton.vllm_engine import main as gateway
from baton.vllm_engine.params import VllmParams
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

ALICE = TenantParams("alice", (key_hash("key-a"),), 1.0, 10.0, 40.0)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    await cluster.start()
    for name in ("prefill-0", "decode-0"):
        await cluster.add(name)
    yield cluster
    await cluster.stop()


@contextlib.asynccontextmanager
async def _gateway(
    cluster: FakeCluster, tmp_path: Path, keyless: TenantParams | None = None, **changes: Any
) -> AsyncIterator[str]:
    """The port of decode-0."""
    router = dataclasses.replace(router_params(write_model(tmp_path / "model"), cluster.address), **changes)
    params = VllmParams(
        "127.0.0.1:0", "pools.decode.vllm_grpc", "decode", "decode-0", "1", 4, "auto", "auto", keyless, router
    )
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(gateway.serve(params, address.set_result))
    try:
        yield await asyncio.wait_for(address, 20)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("secure", [False, True])
async def test_the_gateways_port_has_the_rules_of_the_front_door(
    cluster: FakeCluster, tmp_path: Path, secure: bool
) -> None:
    files, ca, _ = authority(tmp_path / "pki")
    salts: list[str] = []
    said = cluster.script

    def script(leg: pb.Leg, choice: int, index: int) -> int:
        salts.append(leg.cache_salt)
        return said(leg, choice, index)

    cluster.script = script
    access = Access("key-a", ca if secure else None)
    changes: dict[str, Any] = {"tenants": (ALICE,), "tls": files if secure else None}
    async with _gateway(cluster, tmp_path, **changes) as address, _channel(access, address) as channel:
        stub: Any = VllmEngineStub(channel)
        await _serving(channel)
        for given in ((), (("authorization", "Bearer key-x"),)):
            for asked in (_request(4), vllm.GetModelInfoRequest(), vllm.AbortRequest()):
                assert await _status(_call(stub, asked, given)) == grpc.StatusCode.UNAUTHENTICATED
        assert not salts
        keyed = tuple(access.headers.items())
        assert await _status(_call(stub, _request(4), keyed)) == grpc.StatusCode.OK
        assert set(salts) == {salted(ALICE, "")} != {salted(ANYBODY, "")}
        assert await _status(_call(stub, _request(200), keyed)) == grpc.StatusCode.RESOURCE_EXHAUSTED  # over its rate
        await cluster.settled()


async def test_a_gateway_without_a_key_is_the_tenant_that_the_configuration_names(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    salts: list[str] = []
    said = cluster.script

    def script(leg: pb.Leg, choice: int, index: int) -> int:
        salts.append(leg.cache_salt)
        return said(leg, choice, index)

    cluster.script = script
    access = Access("", None)
    async with _gateway(cluster, tmp_path, ALICE, tenants=(ALICE,)) as address, _channel(access, address) as channel:
        stub: Any = VllmEngineStub(channel)
        await _serving(channel)
        assert await _status(_call(stub, _request(4), ())) == grpc.StatusCode.OK
        assert set(salts) == {salted(ALICE, "")}
        wrong = (("authorization", "Bearer key-x"),)
        assert await _status(_call(stub, _request(4), wrong)) == grpc.StatusCode.UNAUTHENTICATED
        assert await _status(_call(stub, _request(200), ())) == grpc.StatusCode.RESOURCE_EXHAUSTED  # over its rate
        await cluster.settled()


def _channel(access: Access, address: str) -> grpc.aio.Channel:
    if access.credentials is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, access.credentials)


async def _serving(channel: grpc.aio.Channel) -> None:
    """Health needs no key."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    async for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=30):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return


def _request(tokens: int) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id=f"{tokens}",
        tokenized=vllm.TokenizedInput(input_ids=[104, 105]),
        sampling_params=vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
    )


def _call(stub: Any, asked: Any, metadata: Any) -> Any:
    names = {"GenerateRequest": "Generate", "GetModelInfoRequest": "GetModelInfo", "AbortRequest": "Abort"}
    return getattr(stub, names[asked.DESCRIPTOR.name])(asked, metadata=metadata, timeout=30)


async def _status(call: Any) -> grpc.StatusCode:
    """Of a whole call."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
    code: grpc.StatusCode = await call.code()
    return code
