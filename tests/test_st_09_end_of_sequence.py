"""ST-09: the end-of-sequence ids are the union of what all files say; a missing file is fine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from baton.proto.errors import ConfigError
from baton.tests.harness.tiny_model import EOS, IM_END, special_id
from baton.text.source import ModelSource, resolve
from baton.text.tokenizer import Tokenizer

END, TURN = special_id(EOS), special_id(IM_END)


def _eos(tiny_dir: Path, to: Path, generation: Any, config: Any, token: Any) -> frozenset[int]:
    """The ids when the three places say this; None = the key, or the generation config itself, is missing."""
    shutil.copytree(tiny_dir, to)
    for file, key, value in (
        ("generation_config.json", "eos_token_id", generation),
        ("config.json", "eos_token_id", config),
        ("tokenizer_config.json", "eos_token", token),
    ):
        content = json.loads((to / file).read_text())
        content.pop(key)
        if value is not None:
            content[key] = value
        (to / file).write_text(json.dumps(content))
    if generation is None:
        (to / "generation_config.json").unlink()
    return Tokenizer.load(resolve(str(to))).eos_token_ids


@pytest.mark.parametrize(
    ("generation", "config", "token", "expected"),
    [
        (END, END, EOS, {END}),
        ([END, TURN], END, EOS, {END, TURN}),
        ([7], 8, EOS, {7, 8, END}),  # conflicting: a union
        (None, None, IM_END, {TURN}),  # tokenizer only
        (None, [5, 6], None, {5, 6}),
        (None, None, {"content": EOS, "special": True}, {END}),
        (None, None, None, set()),
        (None, None, "<no such token>", set()),
    ],
)
def test_st_09_union(
    tiny_dir: Path, tmp_path: Path, generation: Any, config: Any, token: Any, expected: set[int]
) -> None:
    assert _eos(tiny_dir, tmp_path / "model", generation, config, token) == expected


@pytest.mark.parametrize("wrong", ["2", [2, "x"], True, -1, 1.5])
def test_st_09_what_is_no_id_is_refused_by_name(tiny_dir: Path, tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id holds"):
        _eos(tiny_dir, tmp_path / "model", wrong, None, None)


def test_st_09_gguf(smol_source: ModelSource) -> None:
    assert Tokenizer.load(smol_source).eos_token_ids == {2}
