"""What the configuration gives to each process, and that it survives the way there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from baton.cluster import config_load, spec, yaml_tree
from baton.cluster.config import Config
from baton.cluster.rank_runtime import check_visible_devices
from baton.cluster.units import human_bytes, parse_bytes, parse_duration, parse_rate, show_bytes, show_duration
from baton.engine.params import SpeculationParams
from baton.kv_transfer.params import TLSFiles
from baton.proto.errors import ConfigError


def config(text: str = "") -> Config:
    return config_load.build(yaml_tree.parse("model: {path: m}\n" + text, "c"), Path())


@pytest.mark.parametrize("worker", ["prefill-0", "decode-1"])
def test_a_workers_specification_survives_json(worker: str) -> None:
    built = spec.SpecBuilder(config("kv: {transport: gloo}")).worker(worker, "inc", 0, "")
    assert spec.spec_from_json(json.loads(json.dumps(spec.spec_to_json(built)))) == built
    assert len(built.params.secret) == 64


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
