"""DR-04: YAML traps. Every mistake is named with its path, its line and the nearest right key; nothing is dropped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from baton.cluster import config_load, yaml_tree
from baton.cluster.config import Config
from baton.proto.errors import ConfigError


def build(text: str, *settings: str) -> Config:
    tree = yaml_tree.parse("model: {path: m}\n" + text, "c.yaml")
    yaml_tree.override(tree, list(settings))
    return config_load.build(tree, Path())


def mistakes(text: str, *settings: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(text, *settings)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modle: {}", "c.yaml:2: modle: unknown key; did you mean model?"),
        ("kv: {blocksize: 8}", "c.yaml:2: kv.blocksize: unknown key; did you mean kv.block_size?"),
        ("pools:\n  prefil: {}", "c.yaml:3: pools.prefil: unknown key; did you mean pools.prefill?"),
        (
            "pools:\n  decode:\n    replica: 2",
            "c.yaml:4: pools.decode.replica: unknown key; did you mean pools.decode.replicas?",
        ),
        (
            "router: {placement: {prefil: round_robin}}",
            "c.yaml:2: router.placement.prefil: unknown key; did you mean router.placement.prefill?",
        ),
        ("slo: {ttft: {p95: 1s}}", "c.yaml:2: slo.ttft.p95: unknown key; did you mean slo.ttft.p99?"),
    ],
)
def test_a_typo_at_each_level_is_named_with_its_neighbour(text: str, expected: str) -> None:
    assert mistakes(text) == [expected]


def test_flat_instead_of_nested_keys_are_pointed_to_their_place() -> None:
    assert mistakes("max_sequences: 4") == [
        "c.yaml:2: max_sequences: unknown key; did you mean pools.decode.max_sequences?"
    ]
    assert mistakes("pools: {decode: {max_batch_tokens: 4}}") == [
        "c.yaml:2: pools.decode.max_batch_tokens: unknown key; did you mean pools.prefill.max_batch_tokens?"
    ]


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "True", "y"])
def test_loose_booleans_are_refused_and_never_become_true(word: str) -> None:
    found = mistakes(f"kv: {{checksum: {word}}}")
    assert len(found) == 1
    assert "kv.checksum" in found[0]
    assert "must be true or false" in found[0]


def test_false_and_zero_are_kept() -> None:
    config = build("kv: {checksum: false, parking: 0}\nengine: {prefix_cache: false}")
    assert not config.kv.checksum
    assert not config.engine.prefix_cache
    assert config.kv.parking == 0


def test_null_is_a_mistake_where_a_value_is_needed_and_the_default_where_not() -> None:
    assert mistakes("kv: {block_size: null}") == [
        "c.yaml:2: kv.block_size: is empty (null); leave the key out for its default"
    ]
    assert mistakes("kv:") == ["c.yaml:2: kv: is a section with keys of its own, not empty"]
    assert build("hardware: null").hardware is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('kv: {block_size: "16"}', "kv.block_size: is '16', but must be a whole number without quotes"),
        ("kv: {block_size: 16.0}", "kv.block_size: is 16.0, but must be a whole number without quotes"),
        ("kv: {block_size: true}", "kv.block_size: is true, but must be a whole number without quotes"),
        ("kv: {block_size: 0}", "kv.block_size: is 0, but must be at least 1"),
        ("kv: {block_size: [16]}", "kv.block_size: is [16], but must be a whole number without quotes"),
        ("pools: {decode: 2}", "pools.decode: is a section with keys of its own, not 2"),
        ("model: {path: x}", "model: written twice; first at c.yaml:1"),
        ("kv: {memory: 1GiG}", "kv.memory: is 1GiG, but expected a size such as 512MiB or 1GiB"),
        ("clocks: {frame: 5}", "clocks.frame: is 5, but expected a duration with its unit, such as 5s or 5ms"),
        ("workload: {rate: 2}", "workload.rate: is 2, but expected a rate with its unit, such as 2/s"),
        ("hardware: 8", "hardware: is 8, but must be text (in quotes)"),
        (
            "kv: {transport: inlin}",
            "kv.transport: is inlin, but must be auto, inline, shm, gloo, nccl or cuda_ipc; did you mean inline?",
        ),
        ("router: {grpc: localhost}", "router.grpc: is localhost, but expected HOST:PORT"),
    ],
)
def test_wrong_types_and_units_name_the_value(text: str, expected: str) -> None:
    found = mistakes(text)
    assert len(found) == 1
    assert found[0].startswith(f"c.yaml:2: {expected}")


def test_duplicate_keys_are_found_at_any_depth_with_both_lines() -> None:
    assert mistakes("kv:\n  block_size: 8\n  block_size: 16") == [
        "c.yaml:4: kv.block_size: written twice; first at c.yaml:3"
    ]


def test_sexagesimal_numbers_stay_text() -> None:
    assert mistakes("kv: {block_size: 1:30}")[0].startswith("c.yaml:2: kv.block_size: is")


def test_all_mistakes_come_in_one_pass() -> None:
    found = mistakes("kv: {blok: 1, memory: x}\nclocks: {frame: 0}\nrouter: {http: '127.0.0.1:50051'}\nslo: 3")
    assert [line.split(": ")[1] for line in found] == ["kv.memory", "kv.blok", "slo", "router.http", "clocks.frame"]


@pytest.mark.parametrize("text", ["[1, 2]", "just text", "a: [", "a: &x {b: *x}", "\t- x", "? [a]\n: b"])
def test_what_is_no_configuration_is_one_readable_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        config_load.build(yaml_tree.parse(text, "c.yaml"), Path())


def test_an_empty_file_misses_its_model() -> None:
    with pytest.raises(ConfigError, match="model: is missing"):
        config_load.build(yaml_tree.parse("", "c.yaml"), Path())


def test_set_beats_the_file_and_the_origin_is_shown() -> None:
    config = build("kv: {block_size: 8, memory: 2GiB}", "kv.block_size=32", "slo.ttft.p99=250ms", "kv.memory=1MiB")
    assert (config.kv.block_size, config.kv.memory, config.slo.ttft.p99) == (32, 2**20, 0.25)
    lines = config_load.show(config).splitlines()
    assert [line.split() for line in lines if "--set" in line] == [
        ["block_size:", "32", "#", "--set"],
        ["memory:", "1MiB", "#", "--set"],
        ["p99:", "250ms", "#", "--set"],
    ]
    assert [line.split() for line in lines if "c.yaml" in line] == [["path:", "m", "#", "c.yaml:1"]]


def test_the_printed_configuration_is_the_same_configuration() -> None:
    config = build("kv: {block_size: 8}\nslo: {ttft: {p99: 2s}}\nworkload: {prompt_tokens: {mean: 5.5}}")
    again = config_load.build(yaml_tree.parse(config_load.show(config), "again.yaml"), Path())
    assert again.model_dump() == config.model_dump()


def test_a_setting_without_a_value_or_with_a_wrong_key_is_refused() -> None:
    assert mistakes("", "kv.block_size") == ["--set kv.block_size: expected KEY=VALUE, such as --set kv.block_size=32"]
    assert mistakes("", "kv.blok=3")[0].startswith("--set: kv.blok: unknown key; did you mean kv.block_size?")


def test_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_KV_BLOCK_SIZE", "64")
    monkeypatch.setenv("KV_BLOCK_SIZE", "64")
    assert build("").kv.block_size == 16


def test_the_command_exits_2_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {path: m}\nkv: {blok: 1}\n")
    code = (
        "import sys; from baton.cluster import cli; sys.argv = ['baton', 'serve', '--set=kv.block_size=8', 'c.yaml']\n"
        "try: cli.main()\n"
        "finally: assert not {'torch', 'ray'} & set(sys.modules), 'heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "baton: c.yaml:2: kv.blok: unknown key; did you mean kv.block_size?\n"


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "local.yaml").touch()
    with pytest.raises(ConfigError, match=r"no such file; did you mean .*local\.yaml"):
        config_load.load(str(tmp_path / "lokal.yaml"), [])


def test_relative_model_paths_start_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "x").mkdir(parents=True)
    (tmp_path / "c.yaml").write_text("model: {path: models/x}\n")
    assert config_load.load(str(tmp_path / "c.yaml"), []).model_path == str(tmp_path / "models" / "x")
    assert config_load.load(str(tmp_path / "c.yaml"), ["model.path=smollm2"]).model_path == "smollm2"
