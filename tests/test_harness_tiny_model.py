"""The tiny models are what the other tests take them for: whole in Transformers, with spread, and on script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from baton.tests.harness.hf_reference import greedy, load_reference
from baton.tests.harness.tiny_model import EOS, chain, special_id, write_scripted_model, write_tiny_model
from transformers import AutoModelForCausalLM

END = special_id(EOS)


def _report(path: Path) -> list[str]:
    """What Transformers found missing, unexpected or misshapen."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    return [kind for kind, found in loaded[1].items() if found]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_random_models_load_whole_and_have_margins(tmp_path: Path, arch: str, tie: bool) -> None:
    path = write_tiny_model(tmp_path / "model", arch=arch, seed=3, tie=tie)
    assert _report(path) == []
    answer = greedy(load_reference(path), list(b"The river carries"), 48, frozenset())
    assert len(set(answer.token_ids)) > 8
    assert sorted(answer.margins)[2] > 1e-3


def test_other_sizes_load_whole(tmp_path: Path) -> None:
    path = write_tiny_model(
        tmp_path / "model", layers=3, hidden=72, heads=9, kv_heads=3, head_dim=12, vocab=300, attention_bias=True
    )
    assert _report(path) == []


def test_the_scripted_model_follows_its_script(tmp_path: Path) -> None:
    model = load_reference(write_scripted_model(tmp_path / "model", chain(*b"?ABC") | {ord("z"): ord("z")}))
    answer = greedy(model, list(b"Say ?"), 10, frozenset({END}))
    assert answer.token_ids == [*b"ABC", END]
    assert min(answer.margins) > 5
    assert greedy(model, list(b"z"), 5, frozenset({END})).token_ids == [*b"zzzzz"]
