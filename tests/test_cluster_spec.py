"""What the configuration gives to each process, and that it survives the way there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from baton.cluster import config_load, spec, yaml_tree
from baton.cluster.config import Config
from baton.cluster.deployment import make_launcher
from baton.cluster.rank_runtime import check_visible_devices
from baton.cluster.units import human_bytes, parse_bytes, parse_duration, parse_rate, show_bytes, show_duration
from baton.engine.params import SpeculationParams
from baton.kv_transfer.params import TLSFiles
from baton.proto.errors import ConfigError
from baton.router.params import GrpcParams
from baton.tests.harness.rig import merged, tiny_config


def config(text: str = "") -> Config:
    return config_load.build(yaml_tree.parse("model: {path: m}\n" + text, "c"), Path())


@pytest.mark.parametrize("worker", ["prefill-0", "decode-1"])
def test_a_workers_specification_survives_json(worker: str) -> None:
    built = spec.SpecBuilder(config("kv: {transport: gloo}")).worker(worker, "inc", 0, "")
    assert spec.spec_from_json(json.loads(json.dumps(spec.spec_to_json(built)))) == built
    assert len(built.params.secret) == 64


@pytest.mark.parametrize("launcher", ["process", "ray"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_gpus_that_are_not_here_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, launcher: str, role: str
) -> None:
    """A Ray cluster may have them elsewhere; one that is here and too few for all workers is not a mistake yet."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    built = config(f"pools: {{{role}: {{device: cuda}}}}\ncluster: {{launcher: {launcher}}}")
    with pytest.raises(ConfigError, match=rf"pools\.{role}\.device: cuda is not available here .*; use cpu"):
        make_launcher(built)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    make_launcher(config(f"pools: {{{role}: {{device: cuda}}}}\ncluster: {{launcher: process}}"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_exits_2(tmp_path: Path, tiny_dir: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(merged(tiny_config(tiny_dir), {"pools.decode.device": "cuda"})))
    done = subprocess.run(
        [sys.executable, "-m", "baton.cluster.cli", "serve", str(path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert done.stderr.startswith("baton: pools.decode.device: cuda is not available here")
    assert "Traceback" not in done.stderr


def test_the_files_of_tls_are_found_from_anywhere(tmp_path: Path) -> None:
    for name in ("rank.pem", "rank.key", "ca.pem"):
        (tmp_path / name).touch()
    text = "model: {path: m}\nkv: {max_links: 7, tls: {certificate: rank.pem, key: rank.key, ca: ca.pem}}"
    built = spec.SpecBuilder(config_load.build(yaml_tree.parse(text, "c"), tmp_path)).worker("decode-0", "inc", 0, "")
    again = spec.spec_from_json(json.loads(json.dumps(spec.spec_to_json(built)))).params.transfer
    assert again.max_links == 7
    assert again.tls == TLSFiles(*(str(tmp_path / name) for name in ("rank.pem", "rank.key", "ca.pem")))


def test_a_draft_model_is_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    text = "model: {path: m}\nengine: {speculation: {method: draft, draft_model: small, draft_memory: 8MiB}}"
    built = config_load.build(yaml_tree.parse(text, "c.yaml"), tmp_path)
    worker = spec.spec_from_json(spec.spec_to_json(spec.SpecBuilder(built).worker("decode-0", "i", 0, "")))
    assert worker.decode is not None
    assert worker.decode.speculation == SpeculationParams("draft", 8, str(tmp_path / "small"), 8 << 20)


def test_the_routers_parameters_survive_json() -> None:
    params = spec.router_params(config(), "m", "127.0.0.1:9")
    assert spec.router_from_json(json.loads(json.dumps(spec.router_to_json(params)))) == params


def test_gateways_without_a_key_are_a_tenant_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(f"alice: {{keys: [{'a' * 64}]}}")

    def worker(tenant: str) -> spec.WorkerSpec:
        text = f"model: {{path: m}}\nrouter: {{tenants: t.yaml, gateway_tenant: {tenant}}}\n"
        built = config_load.build(yaml_tree.parse(text + "pools: {decode: {vllm_grpc: '127.0.0.1:5'}}", "c"), tmp_path)
        return spec.SpecBuilder(built).worker("decode-0", "i", 0, "")

    made = worker("alice")
    assert made.vllm is not None
    assert made.vllm.keyless is not None
    assert made.vllm.keyless.name == "alice"
    assert spec.spec_from_json(json.loads(json.dumps(spec.spec_to_json(made)))) == made
    with pytest.raises(ConfigError, match=r"router\.gateway_tenant: bob is not in t\.yaml"):
        worker("bob")


def test_pools_may_differ_from_kv() -> None:
    built = spec.SpecBuilder(
        config(
            "kv: {block_size: 8, memory: 1MiB, dtype: float16, wire: int8}\n"
            "pools: {decode: {block_size: 32, memory: 2MiB, kv_dtype: auto}}"
        )
    )
    prefill = built.worker("prefill-0", "i", 0, "").params.engine
    decode = built.worker("decode-0", "i", 0, "").params.engine
    assert (prefill.block_size, prefill.kv_bytes) == (8, 2**20)
    assert (decode.block_size, decode.kv_bytes) == (32, 2**21)
    assert (prefill.kv_dtype, decode.kv_dtype) == ("float16", "auto")
    assert built.worker("decode-0", "i", 0, "").params.transfer.wire == "int8"


def test_each_incarnation_has_a_secret_that_its_ranks_share() -> None:
    builder = spec.SpecBuilder(config())
    first, follower = builder.worker("decode-0", "i", 0, ""), builder.worker("decode-0", "i", 1, "h:1")
    other, again = builder.worker("decode-1", "i", 0, ""), builder.worker("decode-0", "j", 0, "")
    assert first.params.secret == follower.params.secret
    assert len({first.params.secret, other.params.secret, again.params.secret}) == 3


def test_what_concerns_clients_over_grpc_reaches_the_router() -> None:
    text = (
        "router: {grpc_options: {keepalive: 5s, keepalive_timeout: 2s, min_ping_interval: 1s, max_connection_age: 9s, "
        "max_streams: 7, reflection: false, channelz: false, open_inference: false}, "
        "limits: {batch: 3, parallelism: 2}}\nclocks: {lame_duck: 1s}"
    )
    params = spec.router_params(config(text), "m", "h:1")
    assert params.grpc == GrpcParams(5.0, 2.0, 1.0, 9.0, 7, False, False, False)
    assert (params.limits.batch, params.limits.parallelism, params.lame_duck_s) == (3, 2, 1.0)


def test_workers_speak_to_gateways_on_ports_in_a_row() -> None:
    builder = spec.SpecBuilder(config("pools: {decode: {replicas: 2, vllm_grpc: '127.0.0.1:41002'}}"), "m")
    builder.membership_address = "127.0.0.1:9"
    first, second = (builder.worker(f"decode-{number}", "i", 0, "").vllm for number in range(2))
    assert first is not None
    assert second is not None
    assert (first.address, second.address) == ("127.0.0.1:41002", "127.0.0.1:41003")
    assert (second.router.membership_address, second.router.served_name) == ("127.0.0.1:9", "m")
    assert builder.worker("decode-0", "i", 1, "h:1").vllm is None  # ranks that follow serve nobody
    assert builder.worker("prefill-0", "i", 0, "").vllm is None


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("pools: {decode: {replicas: 3, vllm_grpc: '127.0.0.1:50049'}}", "pools.decode.vllm_grpc", "the same port"),
        ("pools: {decode: {replicas: 3, vllm_grpc: '127.0.0.1:65534'}}", "pools.decode.vllm_grpc", "as many ports"),
        ("clocks: {lame_duck: 6s}", "clocks.lame_duck", "half of cluster.stop_grace"),
        ("router: {grpc_options: {keepalive: 0s}}", "router.grpc_options.keepalive", "more than 0"),
    ],
)
def test_ports_and_clocks_that_cannot_be_are_mistakes(text: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        config(text)
    assert key in str(caught.value)


def test_the_host_node_becomes_each_nodes_own_address() -> None:
    built = spec.SpecBuilder(config("cluster: {host: node}")).worker("decode-0", "i", 0, "")
    local = spec.localised(built, "127.0.0.1").params
    assert (local.host, local.transfer.host) == ("127.0.0.1", "127.0.0.1")
    fixed = spec.SpecBuilder(config()).worker("decode-0", "i", 0, "")
    assert spec.localised(fixed, "10.0.0.1") == fixed


def test_a_gpu_rank_sees_exactly_one_device_or_refuses() -> None:
    check_visible_devices("3")
    for wrong in ("", "0,1", " "):
        with pytest.raises(ConfigError, match="exactly one device"):
            check_visible_devices(wrong)


def test_units_are_read_and_shown() -> None:
    assert [parse_bytes(text) for text in ("1GiB", "1.5 KB", "7B", 9)] == [2**30, 1500, 7, 9]
    assert [parse_duration(text) for text in ("250ms", "2s", "1.5m", "1h", 0)] == [0.25, 2.0, 90.0, 3600.0, 0.0]
    assert [parse_rate(text) for text in ("2/s", "30/min")] == [2.0, 0.5]
    assert [show_bytes(value) for value in (2**30, 1536, 1000, 0)] == ["1GiB", "1536B", "1000B", "0B"]
    assert [show_duration(value) for value in (0.25, 2.0, 0.0)] == ["250ms", "2s", "0s"]
    assert [human_bytes(value) for value in (2**30, 1536, 3)] == ["1.0 GiB", "1.5 KiB", "3 B"]
    for parse, wrong in [(parse_bytes, "1"), (parse_bytes, True), (parse_duration, 5), (parse_rate, "2")]:
        with pytest.raises(ValueError, match="expected"):
            parse(wrong)
