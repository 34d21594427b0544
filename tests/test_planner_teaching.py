"""The arithmetic that everyone does by hand: exact to the printed digits, and following every `--set`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from baton.cluster import config_load
from baton.cluster.planner import explain, setup, workload
from baton.cluster.planner.roofline import Roofline, Training, end_to_end
from baton.proto.errors import ConfigError

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "teaching-7b-a100.yaml")


def explained(*settings: str) -> str:
    config = config_load.load(CONFIG, list(settings))
    site = setup.site(config)
    text = explain.lines(site.cost("prefill"), site.cost("decode"), workload.from_config(config))
    return "\n".join(text)


def roofline(*settings: str) -> Roofline:
    return Roofline.of(setup.site(config_load.load(CONFIG, list(settings))).cost("decode"))


def test_the_teaching_figures_are_printed_exactly() -> None:
    text = explained()
    for figure in (
        "2 TB/s / 14 GB = 143 tokens/s",
        "50 * 14 GB = 700 GB/s",
        "7 GB, 286 tokens/s",
        "3.5 GB, 571 tokens/s",
        "gets 239 tokens/s: only 1.7x as many, though it has 3.2x the FLOPs",
        "312 TFLOP/s / 2 TB/s = 156 FLOPs",
        "2 FLOPs for each weight (a product and a sum): 78x below",
        "it is 1: 156x below",
        "= 524,288 B = 512 KiB a token",
        "2048 tokens * 32 sequences * 512 KiB = 34.4 GB (32 GiB)",
        "200 ms + 25 ms * 500 tokens = 12.7 s, of which TPOT makes 98%",
        "200 ms + 499 * 25 ms = 12.675 s",
    ):
        assert figure in text, figure


def test_the_batch_curve() -> None:
    found = re.findall(r"batch +(\d+): +([\d,]+) tokens/s", explained())
    assert {int(b): int(t.replace(",", "")) for b, t in found} == {1: 142, 8: 1061, 32: 3498, 128: 8210}
    for batch, quoted in ((1, 140), (8, 1000), (32, 3500), (128, 8000)):
        assert roofline().throughput(batch) == pytest.approx(quoted, rel=0.065)
    assert "weights alone would give 18,286" in explained()


@pytest.mark.parametrize(
    ("setting", "figure"),
    [
        ("hardware=h100-sxm", "3.35 TB/s / 14 GB = 239 tokens/s"),
        ("hardware=a100-sxm-80", "2.039 TB/s / 14 GB = 146 tokens/s"),
        ("plan.weights=int4", "2 TB/s / 3.5 GB = 571 tokens/s"),
        ("plan.bandwidth=4TB/s", "4 TB/s / 14 GB = 286 tokens/s"),
        ("model.path=llama-3.1-8b", "131,072 B = 128 KiB a token"),
        ("kv.dtype=fp8", "262,144 B = 256 KiB a token"),
        ("workload.output_tokens.mean=100", "25 ms * 100 tokens = 2.7 s"),
    ],
)
def test_every_setting_is_followed(setting: str, figure: str) -> None:
    assert figure in explained(setting)
    assert figure not in explained()


def test_training_holds_what_inference_does_not() -> None:
    held = Training(7e9)
    assert (held.weights, held.gradients, held.adam, held.held) == (14e9, 14e9, 28e9, 56e9)
    assert held.mixed == 112e9
    text = "\n".join(explain.topic("training", "teaching-7b"))
    assert "80-120 GB and more" in text
    assert "Inference holds 14 GB of weights + KV" in text
    with pytest.raises(ConfigError, match="roofline, training"):
        explain.topic("cooking", "teaching-7b")


def test_end_to_end() -> None:
    total, share = end_to_end(0.2, 0.025, 500)
    assert total == pytest.approx(12.7)
    assert round(share, 3) == 0.984
