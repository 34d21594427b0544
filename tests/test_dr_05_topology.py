"""DR-05: mistakes of role and topology are refused together, before any model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from baton.cluster import config_load, yaml_tree
from baton.cluster.model_check import check_model
from baton.proto.errors import ConfigError


def mistakes(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_load.build(yaml_tree.parse("model: {path: m}\n" + text, "c.yaml"), Path())
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("router: {grpc: 'localhost:8000'}", "router.http: is 127.0.0.1:8000, the same port as router.grpc"),
        ("router: {admin: '0.0.0.0:8000'}", "router.admin: is 0.0.0.0:8000, the same port as router.http"),
        ("pools: {prefill: {replicas: 0}}", "pools.prefill.replicas: is 0, but must be at least 1"),
        ("pools: {prefill: {}, prefill: {}}", "pools.prefill: written twice"),
        ("pools: {producer: {}}", "pools.producer: unknown key"),
        ("pools: {decode: {tensor_parallel: 0}}", "pools.decode.tensor_parallel: is 0"),
        ("kv: {transport: nccl}", "kv.transport: is nccl, which moves KV between GPUs, but a pool has device cpu"),
        (
            "kv: {transport: nccl}\npools: {prefill: {device: cuda}}",
            "kv.transport: is nccl, which moves KV between GPUs, but a pool has device cpu",
        ),
        ("kv: {transport: cuda_ipc}", "kv.transport: is cuda_ipc, which moves KV between GPUs"),
        ("kv: {transport: gloo, tls: {certificate: a, key: b, ca: c}}", "is gloo, which does not encrypt, but kv.tls"),
        ("kv: {transport: shm, tls: {certificate: a, key: b, ca: c}}", "is shm, which does not encrypt, but kv.tls"),
        ("kv: {tls: {certificate: a, key: b, ca: c}}", "kv.tls.certificate: is a, which is not a file"),
        ("kv: {tls: {certificate: a, key: b}}", "kv.tls.ca: is missing"),
        ("kv: {tls: {certificate: a, key: b, ca: c, caa: d}}", "kv.tls.caa: unknown key; did you mean kv.tls.ca?"),
        ("kv: {tls: 1}", "kv.tls: is a section with keys of its own, not 1"),
        ("engine: {speculation: {method: draft}}", "engine.speculation.method: is draft, which needs a model that"),
        (
            "engine: {speculation: {draft_model: x}}",
            "engine.speculation.draft_model: is x, but engine.speculation.method",
        ),
        ("kv: {max_links: 1}\npools: {decode: {tensor_parallel: 2}}", "kv.max_links: is 1, but one request may need"),
        ("cluster: {launcher: process, address: auto}", "cluster.launcher: is process"),
        ("cluster: {address: lokal}", "cluster.address: is lokal, but must be local, auto or HOST:PORT"),
        ("kv: {dtype: float8}", "kv.dtype: is float8, but must be auto, float32, bfloat16, float16, int8 or fp8"),
        ("pools: {decode: {kv_dtype: int4}}", "pools.decode.kv_dtype: is int4"),
        ("kv: {dtype: int8, wire: int8}", "kv.wire: is int8, but a pool has kv dtype int8, which is as small already"),
        ("kv: {wire: int8}\npools: {decode: {kv_dtype: fp8}}", "kv.wire: is int8, but a pool has kv dtype fp8"),
        ("kv: {wire: fp16}", "kv.wire: is fp16, but must be raw, fp8 or int8; did you mean fp8?"),
        ("clocks: {heartbeat: 3s}", "clocks.dead_after: is 2s, but must be longer than clocks.heartbeat (3s)"),
        ("clocks: {frame: 0}", "clocks.frame: is 0, but must be more than 0"),
        ("kv: {memory: 10B}", "kv.memory: is 10B, too little for a KV pool"),
        ("pools: {decode: {memory: 10B}}", "pools.decode.memory: is 10B, too little for a KV pool"),
    ],
)
def test_each_mistake_is_refused(text: str, expected: str) -> None:
    assert expected in mistakes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "sparsity: '2:4', quantization: int4",
            "model.sparsity: is 2:4, which needs model.quantization none, not int4",
        ),
        ("quantization: w4a8", "model.quantization: is w4a8, but must be none, w8a8 or int4"),
        (
            "quantization: int4, dtype: float32",
            "model.quantization: is int4, which needs model.dtype bfloat16, not float32",
        ),
    ],
)
def test_quantisation_that_cannot_run_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_load.build(yaml_tree.parse(f"model: {{path: m, {text}}}\n", "c.yaml"), Path())
    assert expected in str(caught.value)


def test_port_0_is_never_a_conflict() -> None:
    text = "model: {path: m}\nrouter: {grpc: '127.0.0.1:0', http: '127.0.0.1:0', admin: '127.0.0.1:0'}"
    config_load.build(yaml_tree.parse(text, "c.yaml"), Path())


def test_mistakes_of_different_kinds_come_together() -> None:
    found = mistakes("pools: {decode: {replicas: 0}}\nkv: {transport: nccl}\nrouter: {grpc: '127.0.0.1:8000'}")
    assert len(found.splitlines()) == 3


def test_more_ranks_than_query_heads_are_refused_from_the_models_own_numbers(tiny_dir: Path) -> None:
    text = f"model: {{path: {tiny_dir}}}\npools: {{decode: {{tensor_parallel: 5}}, prefill: {{tensor_parallel: 4}}}}"
    config = config_load.build(yaml_tree.parse(text, "c.yaml"), Path())
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert str(caught.value) == "pools.decode.tensor_parallel: is 5, but the model has only 4 query heads"


def test_uneven_and_replicated_heads_are_warnings_with_their_cost() -> None:
    text = "model: {path: smollm2-135m-instruct}\npools: {decode: {tensor_parallel: 2}, prefill: {tensor_parallel: 9}}"
    facts = check_model(config_load.build(yaml_tree.parse(text, "c.yaml"), Path()))
    assert (facts.heads, facts.kv_heads) == (9, 3)
    assert facts.warnings == (
        "pools.prefill.tensor_parallel: 9 ranks share 3 KV heads, so each head's KV is held about 3.0 times",
        "pools.decode.tensor_parallel: 3 KV heads over 2 ranks is uneven; the fullest rank has 2, so the worker runs "
        "at 75% of an even split",
    )


def test_every_shipped_configuration_is_valid() -> None:
    folder = Path(config_load.__file__).parent.parent / "configs"
    names = sorted(path.name for path in folder.glob("*.yaml"))
    assert {"h100-multinode.yaml", "h100-node.yaml", "local-tp2.yaml", "local.yaml"} <= set(names)
    for name in names:
        config_load.load(str(folder / name), [])
