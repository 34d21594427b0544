"""Plans for recorded loads, and plans that are played through in the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from baton.cluster import config_load
from baton.cluster.cli import app
from baton.cluster.planner import command, report
from baton.cluster.planner.plans import Plan
from baton.cluster.planner.setup import site
from baton.cluster.planner.workload import from_config, slo_of
from baton.cluster.simulator.confirm import arrivals_of, cluster_of
from baton.cluster.simulator.run import simulate
from baton.proto.errors import ConfigError
from typer.testing import CliRunner

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TEACHING, NODE = str(CONFIGS / "teaching-7b-a100.yaml"), str(CONFIGS / "h100-node.yaml")


def test_a_recorded_load_is_read_and_planned_for(tmp_path: Path) -> None:
    rows = [f"{i / 4},{900 + i % 200},{100 + i % 50}" for i in range(2000)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    load = command.load_of(config_load.load(TEACHING, [f"workload.trace={tmp_path / 't.csv'}"]))
    assert load.rate == pytest.approx(4.0, rel=0.01)
    assert load.prompt.mean == pytest.approx(999.5, rel=0.01)
    assert load.output.mean == pytest.approx(124.5, rel=0.01)
    assert "t.csv, 2000 requests" in load.origin
    with pytest.raises(ConfigError):
        command.load_of(config_load.load(TEACHING, [f"workload.trace={tmp_path / 'none.csv'}"]))


def test_the_simulator_agrees_with_the_closed_forms_about_a_steady_load() -> None:
    config = config_load.load(TEACHING, ["slo.tpot.p99=25ms", "workload.rate=8/s"])
    found = command.decided(config, report.make(config, command.load_of(config)))
    assert len(found.simulated) == 2
    for one in found.simulated:
        tpot, ttft = one.tpot["p50"], one.ttft["p50"]
        assert tpot is not None
        assert ttft is not None
        assert one.plan.tpot.percentiles[0.5] == pytest.approx(tpot, rel=0.10)
        assert one.plan.ttft.percentiles[0.5] == pytest.approx(ttft, rel=0.30)
        assert not one.misses


@pytest.mark.parametrize(
    ("workers", "rate", "spread"), [(1, 8.0, 0.9), (1, 8.0, 0.0), (1, 14.0, 0.9), (1, 14.0, 0.0), (4, 56.0, 0.9)]
)
def test_prompts_that_share_steps_wait_as_long_as_the_closed_form_says(
    workers: int, rate: float, spread: float
) -> None:
    """At utilisations of 0.4 and 0.7. Prompts of one step end together, which one after the other would not."""
    lengths = [f"workload.prompt_tokens={{mean: 2000, cv: {spread}}}", "workload.output_tokens={mean: 100, cv: 0.5}"]
    config = config_load.load(NODE, ["model.path=llama-3.1-8b", f"workload.rate={rate}/s", *lengths])
    found, load = site(config), from_config(config)
    plan = Plan("disaggregated", found.cost("prefill", 1), found.cost("decode", 1), (workers, 8), load, slo_of(config))
    seen = simulate(cluster_of(plan), arrivals_of(load, requests=4000)).results.summary({})["ttft_s"]
    assert plan.ttft.percentiles[0.99] == pytest.approx(seen["p99"], rel=0.15)
    assert plan.ttft.percentiles[0.5] == pytest.approx(seen["p50"], rel=0.15)


def test_the_command_says_what_was_simulated() -> None:
    result = CliRunner().invoke(app, ["plan", TEACHING, "--simulate", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert {one["kind"] for one in said["simulated"]} == {"disaggregated", "aggregated"}
    assert any("chosen by simulation" in note for note in said["notes"])
