"""Keys, tenants and TLS at both front doors: deny by default, one rule a test."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from baton.cluster import config_checks, config_load, yaml_tree
from baton.cluster import tenants as tenants_file
from baton.proto import baton_pb2 as api
from baton.proto import worker_pb2 as pb
from baton.proto.baton_pb2_grpc import BatonStub
from baton.proto.errors import ConfigError, Exhausted, Unauthenticated
from baton.router.params import FrontTLS, TenantParams
from baton.router.tenants import ANYBODY, Tenants, key_hash, salted
from baton.router.token_bucket import TokenBucket
from baton.tests.harness.pki import authority
from baton.tests.harness.router_rig import RouterRig, router_rig
from grpc_health.v1 import health_pb2, health_pb2_grpc

ALICE = TenantParams("alice", (key_hash("key-a"), key_hash("key-a2")), 1.0, None, None)
BOB = TenantParams("bob", (key_hash("key-b"),), 3.0, 10.0, 40.0)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- pure ----------------------------------------------------------------------------------------------------------


def test_a_key_names_its_tenant_and_nothing_else_does() -> None:
    tenants = Tenants((ALICE, BOB), 0.0)
    assert tenants.authenticate("Bearer key-a") is ALICE
    assert tenants.authenticate("bearer key-a2") is ALICE
    assert tenants.authenticate("Bearer key-b") is BOB
    for given in ("", "Bearer", "Bearer ", "key-a", "Basic key-a", "Bearer key-a key-b", f"Bearer {key_hash('key-a')}"):
        with pytest.raises(Unauthenticated):
            tenants.authenticate(given)


def test_without_tenants_nobody_needs_a_key() -> None:
    assert Tenants((), 0.0).authenticate("Bearer whatever") is ANYBODY


def test_salts_of_tenants_never_meet() -> None:
    salts = {salted(tenant, salt) for tenant in (ALICE, BOB) for salt in ("", "x", "alice", "bob")}
    assert len(salts) == 8
    assert salted(ALICE, "x") == salted(ALICE, "x")
    assert salted(ANYBODY, "x") == "x"


def test_a_bucket_pays_waits_owes_and_is_paid_back() -> None:
    bucket = TokenBucket(10.0, 40.0, 0.0)
    assert bucket.take(30, 0.0) == 0
    assert bucket.take(20, 0.0) == pytest.approx(1.0)
    assert bucket.take(20, 1.0) == 0
    assert bucket.take(1000, 1.0) == pytest.approx(4.0)  # more than it ever holds: when it is full
    assert bucket.take(1000, 5.0) == 0
    assert bucket.take(1, 5.0) == pytest.approx(96.1)
    bucket.give_back(990, 5.0)
    assert bucket.take(30, 5.0) == 0
    assert bucket.take(30, 4.0) == pytest.approx(3.0)  # a clock that goes back fills nothing


def test_without_a_key_a_gateway_is_the_tenant_that_is_named_for_it() -> None:
    tenants = Tenants((ALICE, BOB), 0.0, BOB)
    assert tenants.authenticate("") is BOB
    assert tenants.authenticate("Bearer key-a") is ALICE
    with pytest.raises(Unauthenticated):
        tenants.authenticate("Bearer key-x")


def test_a_tenant_over_its_rate_is_told_when_to_come_again() -> None:
    tenants = Tenants((ALICE, BOB), 0.0)
    tenants.charge("bob", 40, 0.0)
    with pytest.raises(Exhausted, match="bob is over its rate") as refused:
        tenants.charge("bob", 20, 0.0)
    assert refused.value.retry_after_s == pytest.approx(2.0)
    tenants.charge("alice", 10**9, 0.0)
    tenants.give_back("bob", 20, 0.0)
    tenants.charge("bob", 20, 0.0)


# ---- the file ------------------------------------------------------------------------------------------------------


def test_a_key_is_made_hashed_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    first, second = tenants_file.make_key("alice", path), tenants_file.make_key("alice", path)
    third = tenants_file.make_key("bob", path)
    assert len({first, second, third}) == 3
    text = path.read_text()
    assert not any(key in text for key in (first, second, third))
    assert path.stat().st_mode & 0o077 == 0
    tenants = Tenants(tenants_file.read(path), 0.0)
    assert tenants.authenticate(f"Bearer {second}").name == "alice"
    assert tenants.authenticate(f"Bearer {third}").name == "bob"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "names no tenant"),
        ("alice: {keys: [secret]}", "alice.keys.0"),
        ("alice: {keys: []}", "alice.keys"),
        (f"alice: {{keys: [{key_hash('k')}], wight: 2}}", "alice.wight"),
        (f"alice: {{keys: [{key_hash('k')}], weight: 0}}", "alice.weight"),
        (f'"a b": {{keys: [{key_hash("k")}]}}', "a name is letters"),
        (f"a: {{keys: [{key_hash('k')}]}}\nb: {{keys: [{key_hash('k')}]}}", "the same key"),
        ("[", "router.tenants"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"router\.tenants") as refused:
        tenants_file.read(path)
    assert complaint in str(refused.value)


def test_open_listeners_are_warned_of(tmp_path: Path) -> None:
    def warnings(text: str) -> list[str]:
        (tmp_path / "c.yaml").write_text(f"model: {{path: m}}\nrouter: {text}")
        return config_checks.exposed(config_load.build(yaml_tree.read(tmp_path / "c.yaml"), tmp_path))

    assert warnings("{}") == []
    (grpc_line, admin_line) = warnings('{grpc: "0.0.0.0:1", admin: "10.0.0.1:2"}')
    assert "without a key" in grpc_line
    assert "drain workers" in admin_line
    assert "drain" in warnings('{admin: "10.0.0.1:2"}')[0]
    (worker_line,) = warnings("{}\ncluster: {host: node}")
    assert "give cluster.tls" in worker_line
    (gateway_line,) = warnings('{}\npools: {decode: {vllm_grpc: "0.0.0.0:5"}}')
    assert "pools.decode.vllm_grpc listens on 0.0.0.0:5" in gateway_line
    (tmp_path / "x.pem").write_text("")
    tls = "{certificate: x.pem, key: x.pem, ca: x.pem}"
    assert warnings(f'{{admin: "10.0.0.1:2"}}\ncluster: {{host: node, tls: {tls}}}') == []
    tenants_file.make_key("alice", tmp_path / "tenants.yaml")
    assert warnings('{grpc: "0.0.0.0:1", http: "0.0.0.0:2", tenants: tenants.yaml}') == []
    named = "{tenants: tenants.yaml, gateway_tenant: alice}"
    (keyless_line,) = warnings(f'{named}\npools: {{decode: {{vllm_grpc: "0.0.0.0:5"}}}}')
    assert "without a key" in keyless_line
    with pytest.raises(ConfigError, match=r"router.tenants: is missing.yaml, which is not a file"):
        warnings("{tenants: missing.yaml}")
    with pytest.raises(ConfigError, match=r"router.gateway_tenant: needs router.tenants"):
        warnings("{gateway_tenant: alice}")


# ---- both doors ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0", tenants=(ALICE, BOB)) as rig:
        rig.http.headers.update(bearer("key-a"))
        yield rig


async def test_every_path_but_those_for_balancers_needs_a_key(guarded: RouterRig) -> None:
    base = f"http://{guarded.addresses['http']}"
    paths = ["/v1/models", "/v1/completions", "/v1/chat/completions", "/metrics", "/version", "/debug/requests/x", "/"]
    async with httpx.AsyncClient(base_url=base, trust_env=False) as http:
        for path in [*paths, "/nothing", "/health/", "//health", "/health/../metrics", "/live?x=/v1/models", "/LIVE"]:
            for headers in ({}, bearer("key-x"), {"host": "x/health", "x-original-url": "/health"}):
                for method in ("GET", "POST", "PUT", "OPTIONS"):
                    answer = await http.request(method, path, headers=headers, json={"model": "tiny"})
                    if path.startswith("/live?") and method == "GET":
                        continue  # the query is no part of the path
                    assert answer.status_code == 401, (method, path)
                    assert answer.json()["error"]["code"] == "unauthenticated"
                    assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/live", "/ready", "/health"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/metrics", headers=bearer("key-b"))).status_code == 200
        twice = [("authorization", "Bearer key-x"), ("authorization", "Bearer key-a")]
        assert (await http.get("/metrics", headers=twice)).status_code == 401


async def test_every_method_but_health_needs_a_key(guarded: RouterRig) -> None:
    calls = ["/baton.v1.Baton/Generate", "/baton.v1.Baton/ListModels", "/baton.v1.Baton/Nothing", "/x.Y/Z"]
    calls += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/grpc.channelz.v1.Channelz/GetServers"]
    for name in calls:
        for metadata in ((), (("authorization", "Bearer key-x"),), (("authorization", "Bearer key-a"),) * 2):
            call: Any = guarded.channel.unary_unary(name, request_serializer=api.ListModelsRequest.SerializeToString)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(api.ListModelsRequest(), metadata=metadata, timeout=20)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED, name
    health: Any = health_pb2_grpc.HealthStub(guarded.channel)
    async for answer in health.Watch(health_pb2.HealthCheckRequest(), timeout=20):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    await health.Check(health_pb2.HealthCheckRequest(), timeout=20)


async def test_the_salt_and_the_turn_are_the_tenants(guarded: RouterRig) -> None:
    salts: list[str] = []
    seen: list[str] = []
    said = guarded.cluster.script

    def script(leg: pb.Leg, choice: int, index: int) -> int:
        seen.append(leg.cache_salt)
        return said(leg, choice, index)

    guarded.cluster.script = script
    for key, salt in (("key-a", ""), ("key-a2", ""), ("key-b", ""), ("key-a", "x")):
        seen.clear()
        request = api.GenerateRequest(prompt="hi", max_tokens=3, cache_salt=salt)
        metadata = (("authorization", f"Bearer {key}"),)
        async for _ in BatonStub(guarded.channel).Generate(request, metadata=metadata, timeout=30):
            pass
        salts.append(seen[0])
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert "alice" not in "".join(salts)


async def test_a_tenant_over_its_rate_gets_429_and_others_do_not(guarded: RouterRig) -> None:
    body = {"model": "tiny", "prompt": "x" * 20, "max_tokens": 200, "ignore_eos": False}
    statuses = [
        (await guarded.http.post("/v1/completions", json=body, headers=bearer("key-b"))).status_code for _ in range(2)
    ]
    # 20 + 200 is more than bob's bucket of 40: let in once, and owed but for what was not generated
    assert statuses[0] == 200
    for _ in range(10):
        answer = await guarded.http.post("/v1/completions", json=body, headers=bearer("key-b"))
        if answer.status_code == 429:
            break
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "over its rate" in answer.json()["error"]["message"]
    assert (await guarded.http.post("/v1/completions", json=body, headers=bearer("key-a"))).status_code == 200


# ---- TLS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutual", [False, True])
async def test_both_doors_speak_tls_and_ask_for_certificates(tmp_path: Path, mutual: bool) -> None:
    files, ca, certificate = authority(tmp_path / "pki")
    key = Path(files.key)
    root, *pair = [path.read_bytes() for path in (ca, key, certificate)]
    files = FrontTLS(files.certificate, files.key, str(ca) if mutual else "")
    async with router_rig(tmp_path, tls=files) as rig:
        https = f"https://localhost:{rig.addresses['http'].rpartition(':')[2]}"
        context = ssl.create_default_context(cafile=str(ca))
        target = f"localhost:{rig.addresses['grpc'].rpartition(':')[2]}"

        async def http_status(context: ssl.SSLContext) -> int:
            async with httpx.AsyncClient(verify=context, trust_env=False) as http:
                return (await http.get(f"{https}/live")).status_code

        async def grpc_health(credentials: grpc.ChannelCredentials) -> int:
            async with grpc.aio.secure_channel(target, credentials) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status)

        plain, own = grpc.ssl_channel_credentials(root), grpc.ssl_channel_credentials(root, *pair)
        if mutual:
            with pytest.raises(httpx.HTTPError):
                await http_status(context)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await grpc_health(plain)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            context.load_cert_chain(certificate, key)
        assert await http_status(context) == 200
        assert await grpc_health(own if mutual else plain) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False) as http:
                await http.get(https.replace("https", "http") + "/live")
        await rig.http.aclose()
        rig.http = httpx.AsyncClient(base_url=https, verify=context, trust_env=False)  # for the oracles


async def test_files_of_tls_that_cannot_be_used_end_the_start(tmp_path: Path) -> None:
    bad = tmp_path / "x.pem"
    bad.write_text("nothing")
    with pytest.raises(ConfigError, match=r"router.tls: certificate .*x.pem"):
        async with router_rig(tmp_path, tls=FrontTLS(str(bad), str(bad), "")):
            pass
