"""Costs: sizes that the engine allocates, terms that add up, laws of one form, transfers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from baton.cluster import config_load, hardware
from baton.cluster.hardware import Hardware
from baton.cluster.planner import model_shape, setup
from baton.cluster.planner.all_reduce import all_reduce_s
from baton.cluster.planner.costs import CostModel, Options
from baton.cluster.planner.model_shape import Shape
from baton.engine.paged_kv import bytes_per_block
from baton.engine.partition import head_ranges
from baton.proto.errors import ConfigError
from baton.proto.kv_layout import KVLayout


def profile(name: str) -> Hardware:
    return Hardware.model_validate(yaml.safe_load((hardware.CATALOGUE / f"{name}.yaml").read_text()))


def model(name: str) -> Shape:
    return model_shape.find(name, Path())


def cost(name: str = "llama-3.1-8b", gpu: str = "h100-sxm", tp: int = 1, options: Options | None = None) -> CostModel:
    return CostModel(model(name), profile(gpu), tp, options or Options())


@pytest.mark.parametrize(
    ("name", "tp", "kind", "block"),
    [
        ("llama-2-7b", 1, "bfloat16", 16),  # a KV head for each query head
        ("llama-3.1-8b", 2, "bfloat16", 16),  # grouped
        ("qwen3-30b-a3b", 8, "float16", 32),  # 4 heads on 8 ranks: replicated
        ("smollm2-135m", 2, "float32", 4),  # 3 heads on 2 ranks: uneven
        ("qwen3-8b", 1, "int8", 16),  # codes and scales
        ("opt-13b", 4, "fp8", 8),
    ],
)
def test_pb_08_kv_bytes_are_those_that_the_engine_allocates(name: str, tp: int, kind: str, block: int) -> None:
    found = cost(name, tp=tp, options=Options(kv=kind, block_size=block))
    shape = found.shape
    ranges = head_ranges(shape.kv_heads, tp)
    layout = KVLayout("", shape.layers, shape.kv_heads, shape.head_dim, "", kind, block, ranges)
    assert block * found.kv_rank_bytes == max(bytes_per_block(layout, rank) for rank in range(tp))
    whole = replace(layout, head_ranges=((0, shape.kv_heads),))
    assert block * found.kv_token_bytes == bytes_per_block(whole, 0)


def test_known_sizes_of_kv() -> None:
    known: dict[str, float] = {
        "llama-3.1-8b": 128,
        "llama-3.1-70b": 320,
        "qwen3-8b": 144,
        "qwen3-32b": 256,
        "qwen2.5-7b": 56,
    }
    known |= {"llama-2-7b": 512, "llama-2-13b": 800, "smollm2-135m": 22.5}
    for name, kib in known.items():
        assert cost(name).kv_token_bytes == kib * 1024, name


def test_heads_that_several_ranks_hold_are_sent_to_each() -> None:
    """Mooncake's Qwen3-235B: 4 KV heads on 8 ranks move 385 KB a token, not 193."""
    found = cost("qwen3-235b-a22b", tp=8)
    assert found.transfer_bytes(1) == pytest.approx(385e3, rel=0.01)
    assert found.transfer_bytes(1, to_tp=4) == pytest.approx(192.5e3, rel=0.01)


def test_blocks_of_a_vllm_that_said_how_many_it_has() -> None:
    found = cost("llama-3.1-8b", "rtx-4090", options=Options(max_batch_tokens=2048))
    assert found.kv_blocks == pytest.approx(2588, rel=0.03)


def test_every_model_of_the_catalogue_has_the_size_of_its_name() -> None:
    sizes = {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "qwen3-32b": 32.8, "qwen3-235b-a22b": 235}
    for name, billions in sizes.items():
        assert model(name).total == pytest.approx(billions * 1e9, rel=0.01), name
    for path in model_shape.CATALOGUE.glob("*.yaml"):
        assert model(path.stem).active <= model(path.stem).total


def test_experts_are_read_as_far_as_a_batch_touches_them() -> None:
    sparse, dense = cost("qwen3-30b-a3b"), cost("llama-3.1-8b")
    reads = [sparse.decode_terms(batch, 0).weights for batch in (1, 8, 64, 4096)]
    assert all(low < high for low, high in pairwise(reads))
    assert reads[0] < 0.15 * reads[-1]
    assert dense.decode_terms(1, 0).weights == dense.decode_terms(64, 0).weights
    assert sparse.shape.active == pytest.approx(3e9, rel=0.15)


def test_laws_are_the_terms() -> None:
    found = cost()
    law = found.decode_law
    for batch, context in ((1, 100), (32, 50_000)):
        assert law.seconds((1, batch, context)) == pytest.approx(found.decode_step_s(batch, context), rel=1e-6)
    prefill = found.prefill_law
    assert prefill.seconds((1, 1000, 1000**2)) == pytest.approx(found.prefill_s(1000), rel=1e-6)
    assert prefill.seconds((1, 500, 1000**2 - 500**2)) == pytest.approx(found.prefill_s(500, 500), rel=1e-6)


def test_a_cached_prefix_saves_its_own_work_only() -> None:
    found = cost()
    assert found.prefill_s(1000, 1000) < found.prefill_s(2000)
    assert found.prefill_s(1000, 1000) > found.prefill_s(1000)


def test_quantised_weights_are_read_faster_and_leave_more_room() -> None:
    plain, fewer = cost(), cost(options=Options(weights="int4"))
    assert fewer.decode_terms(1, 0).weights < 0.4 * plain.decode_terms(1, 0).weights
    assert fewer.kv_blocks > plain.kv_blocks
    assert fewer.prefill_terms(2048).compute == plain.prefill_terms(2048).compute  # products are in 16 bits
    assert cost(options=Options(weights="fp8")).prefill_terms(2048).compute < plain.prefill_terms(2048).compute


def test_speculation_pays_where_weights_are_what_takes_time() -> None:
    plain, guessing = cost(), cost(options=Options(spec_tokens=3, spec_accepted=0.6))
    assert guessing.tokens_per_step == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert guessing.token_law.seconds((1, 1, 1000)) < 0.65 * plain.token_law.seconds((1, 1, 1000))


def test_all_reduce_has_two_regimes() -> None:
    assert all_reduce_s(16e3, 8, 450e9, "h100") == pytest.approx(5.3e-6)
    assert all_reduce_s(1e6, 2, 300e9, "a100") == pytest.approx(11e-6)
    assert all_reduce_s(64e6, 8, 450e9, "h100") == pytest.approx(325e-6, rel=0.15)
    assert all_reduce_s(1e9, 1, 450e9, "h100") == 0
    sizes = [all_reduce_s(size, 4, 450e9, "h100") for size in (1e3, 1e5, 1e6, 5e6, 2e7, 1e9)]
    assert all(low <= high for low, high in pairwise(sizes))


def test_transfers_hide_behind_computing_but_for_the_last_group() -> None:
    found = cost("llama-3.1-70b", tp=4, options=Options(layer_group=4, link=12.5e9))
    alone = found.transfer_s(2048)
    assert alone == pytest.approx(2048 * 327_680 / 50e9, rel=0.05)
    assert found.transfer_s(2048, computed_s=1.0) < 0.1 * alone
    assert found.transfer_s(2048, load=0.5) > 1.8 * alone
    short = found.transfer_s(16, computed_s=0.001)  # twenty latencies cost more than they hide
    assert short <= found.message_s + found.transfer_bytes(16) / found.bandwidth_to() + 1e-9


def test_any_config_json_is_a_model(tmp_path: Path) -> None:
    fields = {"architectures": ["NewForCausalLM"], "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8}
    fields |= {"num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "num_local_experts": 4}
    fields |= {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = model_shape.find(str(tmp_path), Path())
    assert (found.experts, found.active_experts, found.intermediate, found.head_dim) == (4, 2, 128, 32)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(ConfigError, match="num_attention_heads is missing"):
        model_shape.find(str(tmp_path), Path())
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-8b"):
        model_shape.find("llama-3.1-8", Path())


def test_a_model_and_a_machine_of_the_users_own(tmp_path: Path) -> None:
    sizes = "layers: 2\nhidden: 64\nheads: 4\nkv_heads: 2\nhead_dim: 16\nintermediate: 128\nvocab_size: 500\n"
    (tmp_path / "mine.yaml").write_text(sizes)
    (tmp_path / "box.yaml").write_text("memory: 8GiB\nbandwidth: 10GB/s\nflops: 90GFLOP/s\nsource: me\n")
    (tmp_path / "c.yaml").write_text("model: {path: mine.yaml}\nhardware: box.yaml\n")
    site = setup.site(config_load.load(str(tmp_path / "c.yaml"), []))
    assert site.cost("decode").kv_token_bytes == 2 * 2 * 2 * 16 * 2
    (tmp_path / "mine.yaml").write_text(sizes.replace("layers: 2", "layers: 0"))
    with pytest.raises(ConfigError, match="layers is 0"):
        setup.site(config_load.load(str(tmp_path / "c.yaml"), []))
