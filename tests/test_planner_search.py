"""The search: the cheapest of all plans, bad questions refused, limits that cannot be met named, files that run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from baton.cluster import config_load
from baton.cluster.cli import app
from baton.cluster.config import Config
from baton.cluster.config_workload import Lengths
from baton.cluster.planner import command, report, setup, workload
from baton.cluster.planner.plans import Kind
from baton.cluster.planner.search import Search
from baton.cluster.planner.setup import Site
from baton.cluster.planner.workload import Distribution, Slo, Workload
from baton.proto.errors import ConfigError
from typer.testing import CliRunner

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TEACHING = str(CONFIGS / "teaching-7b-a100.yaml")
KINDS: Sequence[Kind] = ("disaggregated", "aggregated")


def configured(*settings: str) -> Config:
    return config_load.load(TEACHING, list(settings))


def site(*settings: str) -> Site:
    return setup.site(configured(*settings))


def load(rate: float, prompt: float = 1024, output: float = 256) -> Workload:
    lengths = [Distribution.of(Lengths(mean=mean, cv=0.8)) for mean in (prompt, output)]
    return Workload(rate, lengths[0], lengths[1])


SIX = [
    (load(3), Slo({0.99: 1.0}, {0.99: 0.05})),
    (load(9), Slo({0.9: 0.4}, {0.9: 0.03}, 0.9)),
    (load(12, 256, 512), Slo({0.99: 0.5}, {0.99: 0.04}, 0.95)),
    (load(6, 4000, 50), Slo({0.5: 1.0, 0.99: 4.0}, {0.99: 0.06})),
    (load(10, 600, 600), Slo({}, {0.99: 0.03})),
    (load(8, 2000, 200), Slo({0.99: 2.0}, {0.5: 0.025, 0.99: 0.04}, 0.99)),
]


@pytest.mark.parametrize("number", range(6))
def test_no_plan_is_cheaper_than_the_one_found(number: int) -> None:
    asked, slo = SIX[number]
    search = Search(site(), 64, [1, 2])
    for kind in KINDS:
        found = search.cheapest(kind, asked, slo)
        every = [plan.gpus for plan in search.all_plans(kind, asked, slo, 9) if plan.meets]
        assert every, "the space searched by hand must hold a plan"
        assert found is not None
        assert found.gpus == min(every)
        assert not found.misses


def test_a_large_search_takes_seconds() -> None:
    started = time.process_time()
    found = Search(site("model.path=llama-3.1-70b", "hardware=h100-sxm"), 512, [1, 2, 4, 8]).run(
        load(150), Slo({0.99: 1.0}, {0.99: 0.05}, 0.95)
    )
    assert found.best is not None
    assert time.process_time() - started < 30


# ---- PB-01, PB-02, PB-03 --------------------------------------------------------------------------------------------


def test_pb_01_no_load_is_the_least_plan_and_no_number_is_a_mistake() -> None:
    search, slo = Search(site(), 64, [1]), Slo({0.99: 1.0}, {0.99: 0.05})
    found = search.run(load(0), slo)
    assert found.aggregated is not None
    assert found.aggregated.replicas == (0, 1)
    assert found.disaggregated is not None
    assert found.disaggregated.replicas == (1, 1)
    assert math.isfinite(found.disaggregated.ttft.percentiles[0.99])
    assert found.disaggregated.dollars_million(True) is None  # no tokens: no price of one
    for rate in (math.nan, math.inf, -1.0):
        with pytest.raises(ConfigError, match=r"workload\.rate"):
            search.run(load(rate), slo)
    for requests in ([], [(0.0, 5, 5)], [(1.0, 5, 5), (1.0, 5, 5)]):
        with pytest.raises(ConfigError, match="at least two requests"):
            workload.from_requests(requests, 0.0, "t")


def test_pb_02_limits_of_nothing_are_refused_and_leaving_a_measured_range_is_said(tmp_path: Path) -> None:
    search = Search(site(), 64, [1])
    for limits in (Slo({0.99: 0.0}, {}), Slo({}, {0.99: -1.0}), Slo({0.5: math.nan}, {})):
        with pytest.raises(ConfigError, match="must be more than 0"):
            search.run(load(1), limits)
    with pytest.raises(ConfigError, match=r"slo\.ttft\.p99: is 0"):
        workload.slo_of(configured("slo.ttft.p99=0"))
    law = "a: 0.01, b: 0.0001, c: 0.000000001, steps: 9, tokens: [1, 4], context: [16, 64], mean_error: 0, p90_error: 0"
    (tmp_path / "hw.yaml").write_text(
        "memory: 80GB\nbandwidth: 2000GB/s\nflops: 312TFLOP/s\nsource: x\nmeasured:\n"
        "- {model: teaching-7b, dtype: bfloat16, quantization: none, tensor_parallel: 1, threads: 1,\n"
        f"   prefill: {{{law}}}, decode: {{{law}}}, version: '1', device: d, date: today}}\n"
    )
    config = configured(f"hardware={tmp_path / 'hw.yaml'}", "plan.tensor_parallel=[1]")
    notes = "\n".join(report.notes(report.make(config, workload.from_config(config))))
    assert "calibrated today, 9 steps" in notes
    assert "extrapolated: batches of" in notes
    assert "extrapolated: prompts of" in notes


def test_pb_03_what_no_number_of_workers_cures_is_said_and_replicas_follow_load() -> None:
    search, slo = Search(site(), 256, [1, 2]), Slo({0.99: 0.001}, {0.99: 0.05})
    many, few = search.run(load(20), slo), search.run(load(0.001), slo)
    assert "no number of workers helps" in many.impossible[0]
    assert many.relaxed.ttft[0.99] > 0.001
    assert few.best is not None
    assert few.best.gpus <= 4
    assert many.best is not None
    assert many.best.gpus < 256  # the nearest that can be met, not all there are
    assert not replace(many.best, slo=many.relaxed).misses


# ---- PB-09 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["workload.prompt_tokens.mean=256", "workload.rate=2/s"], "short prompts"),
        (["workload.rate=6/min"], "a load that one worker serves"),
        (["plan.link=1GB/s", "workload.prompt_tokens.mean=4000"], "a slow link"),
    ],
)
def test_pb_09_the_answer_may_be_not_to_disaggregate(settings: list[str], why: str) -> None:
    config = configured(*settings)
    found = report.make(config, workload.from_config(config))
    assert found.plan is not None
    assert found.plan.kind == "aggregated", why
    assert report.verdict(found).startswith("do not disaggregate")
    both = report.as_json(found)["alternatives"]
    assert both["aggregated"]["ranks"] <= (both["disaggregated"] or {"ranks": 10**9})["ranks"]


def test_tight_token_times_are_what_disaggregation_is_for() -> None:
    config = configured("slo.tpot.p99=22ms", "workload.prompt_tokens.mean=2048", "workload.rate=6/s")
    found = report.make(config, workload.from_config(config))
    assert found.plan is not None
    assert found.plan.kind == "disaggregated"
    assert report.verdict(found).startswith("disaggregate:")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_too_few_gpus_give_the_most_that_they_serve() -> None:
    config = configured("workload.rate=100/s", "plan.gpus=4")
    found = report.make(config, workload.from_config(config))
    assert found.found.best is None
    assert found.plan is not None
    assert found.plan.gpus <= 4
    assert found.plan.misses
    assert 0 < found.capacity < 100
    assert "no plan meets the limits" in report.verdict(found)


def test_a_model_that_fits_nowhere_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"GB are missing for the weights.*plan\.weights"):
        Search(site("model.path=llama-3.1-70b"), 1, [1]).run(load(1), Slo({}, {}))


def test_sensitivity_moves_the_right_way() -> None:
    config = configured("slo.tpot.p99=25ms", "workload.rate=6/s")
    found = report.make(config, workload.from_config(config))
    by_name = {change.what: change.times for change in found.changes}
    assert min(times or 0 for times in by_name.values()) >= 0.99
    assert max(times or 0 for name, times in by_name.items() if name.startswith("one more")) > 1.05


def test_json_and_a_file_that_the_loader_takes(tmp_path: Path) -> None:
    place = tmp_path / "plan.yaml"
    runner = CliRunner()
    asked = ["plan", str(CONFIGS / "local.yaml"), "--json", "--write", str(place), "--set", "slo.ttft.p99=8s"]
    result = runner.invoke(app, asked)
    assert result.exit_code == 0, result.output
    said = json.loads(result.output[: result.output.rindex("}") + 1])
    assert said["plan"]["ttft"]["method"].startswith("M/G/c")
    assert said["plan"]["ttft"]["p50"] <= said["plan"]["ttft"]["p99"]
    written = config_load.load(str(place), [])
    wanted = said["alternatives"]["disaggregated"]["pools"]
    assert written.pools.prefill.replicas == wanted["prefill"]["replicas"]
    assert written.pools.decode.max_sequences == wanted["decode"]["max_sequences"]
    assert written.slo.ttft.p99 == 8.0
    assert "baton plan" in place.read_text().splitlines()[0]


def test_tables_name_the_method_and_infeasible_plans_exit_1() -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["plan", TEACHING, "--set", "slo.ttft.p99=1ms"])
    assert result.exit_code == 1
    for part in ("infeasible: TTFT p99 below 1 ms", "TPOT p50 / p90 / p99", "Kimura", "coefficients"):
        assert part in result.output
    assert "Examples:" in runner.invoke(app, ["plan", "--help"]).output


def test_a_recorded_load_is_planned_for_at_its_busiest() -> None:
    calm = [(float(i), 100, 100) for i in range(0, 3000, 3)]
    busy = [(1500 + i / 4, 100, 100) for i in range(1200)]
    found = workload.from_requests(sorted(calm + busy), 0.0, "a trace")
    assert found.rate == pytest.approx(2200 / 2997, rel=0.01)
    assert found.busiest == pytest.approx(4.33, rel=0.02)
    assert found.burstiness == pytest.approx(1.0, abs=0.05)
    assert command.load_of(configured()).busiest == 4.0
