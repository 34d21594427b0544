"""`baton simulate` and the closed loop's comparison: the same numbers in table, JSON and report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from baton.cluster import simulate
from baton.cluster.bench_compare import compare, read_record, recorded, with_blocks, write_record
from baton.cluster.bench_stats import Sample
from baton.cluster.bench_watch import Watch
from baton.cluster.charts import Axis, Series, chart
from baton.cluster.comparison import comparison
from baton.cluster.config import Config
from baton.cluster.config_load import load as load_config
from baton.cluster.planned import planned
from baton.cluster.report_page import page
from baton.cluster.simulator import profile as profiles
from baton.cluster.simulator.measure import between, differ
from baton.cluster.simulator.profile import Profile
from baton.cluster.simulator.spec import Fail, LayeredTransfer, Overheads, Scale, Switch
from baton.cluster.simulator.traces import Options
from baton.cluster.simulator.traces import load as load_trace
from baton.cluster.simulator.workload import Load
from baton.proto.errors import ConfigError
from baton.proto.step_time import StepTime

PROFILE = Profile(
    "made up",
    StepTime(0.003, 2.5e-4, 1e-8),
    StepTime(0.007, 5e-4, 1e-6),
    800,
    800,
    LayeredTransfer(0.001, 1e-6, 1),
    Overheads(0.001, 0.0005),
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    text = {
        "model": {"path": "smollm2-135m-instruct"},
        "slo": {"ttft": {"p99": "500ms"}, "tpot": {"p99": "20ms"}},
        "workload": {"rate": "4/s", "prompt_tokens": {"mean": 200, "cv": 0.5}, "output_tokens": {"mean": 30}},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(text))
    return load_config(str(path), [])


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(profiles.to_fields(PROFILE)))
    return path


def wanted(config: Config, profile: Path, as_json: bool = False, html: Path | None = None) -> simulate.Wanted:
    load = Load(config.workload, requests=300)
    return simulate.Wanted(load, profile, (), 1, html is not None, as_json, html)


def test_a_profile_survives_its_file(profile: Path) -> None:
    assert profiles.load(profile) == PROFILE
    profile.write_text("prefill: fast")
    with pytest.raises(ConfigError, match="no profile"):
        profiles.load(profile)


def test_table_json_and_report_show_the_same_run(
    config: Config, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "report.html"
    assert simulate.run(config, wanted(config, profile, html=html)) == 0
    table = capsys.readouterr().out
    assert simulate.run(config, wanted(config, profile, as_json=True)) == 0
    result = json.loads(capsys.readouterr().out)
    p99 = f"{1000 * result['simulated']['ttft_s']['p99']:.1f} ms"
    assert p99 in table
    assert p99 in html.read_text()
    assert "poisson 4/s: 300 completed" in table
    assert result["simulated"]["workers"]["decode"]["busy"] > 0
    assert result["timeline"]["simulated"]["at"]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "path"):
            assert self.open.pop() == tag


def test_the_report_is_one_file_that_loads_nothing(config: Config, profile: Path) -> None:
    result = simulate.simulated(config, profiles.load(profile), wanted(config, profile, html=Path("x")))
    text = page(result)
    reader = _Reader()
    reader.feed(text)
    assert not reader.open
    kinds = {tag for tag, _ in reader.tags}
    assert {"svg", "table", "figure"} <= kinds
    assert not kinds & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    numbers = [float(n) for _, attrs in reader.tags for key in ("cx", "cy") if (n := attrs.get(key)) is not None]
    assert numbers
    assert all(0 <= number <= 620 for number in numbers)


def samples(count: int = 60) -> list[Sample]:
    """As a cluster that is exactly as the profile says would answer one request at a time."""
    found = []
    for number in range(count):
        sent, prompt, output = 100.0 + 2.0 * number, 100 + number, 1 + number % 20
        first = sent + 0.003 + PROFILE.prefill.seconds((1.0, float(prompt), float(prompt**2)))
        times = [first]
        for token in range(output - 1):
            step = PROFILE.decode.seconds((1.0, 1.0, float(prompt + token + 1)))
            times.append(times[-1] + step + (0.001 + 1e-6 * prompt if not token else 0.0))
        arrivals = tuple((when, 1) for when in times)
        found.append(Sample(sent, times[-1], arrivals, prompt, "", number < 5, output, 0.001 + 1e-6 * prompt))
    return found


def test_what_the_profile_describes_exactly_is_simulated_without_error(config: Config) -> None:
    result = compare(config, PROFILE, samples(), None, {"workload": "made up", "notes": []}, None)
    lines = {line.label: line for line in comparison(result)}
    for label in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "End to end p99", "Transfer, exposed p50"):
        error = lines[label].error("simulated")
        assert error == pytest.approx(0, abs=2e-3), label
    assert lines["Within the p99 limits"].error("simulated") == 0
    assert result["simulated"]["requests"]["completed"] == result["measured"]["requests"]["completed"] == 55
    assert "planned" not in result
    planned = {"ttft_s": {"p50": 1.0}, "requests": {"completed": 0}}
    beside = compare(config, PROFILE, samples(), None, {"workload": "", "notes": []}, planned)
    error = {line.label: line for line in comparison(beside)}["TTFT p50"].error("planned")
    assert error is not None
    assert error > 5
    assert "planned error" in page(beside)


def test_the_planners_word_uses_the_laws_that_were_measured(config: Config) -> None:
    named = config.model_copy(update={"hardware": "cpu"})
    assert planned(config, PROFILE, recorded(samples())) is None  # no hardware is named
    calm = planned(named, PROFILE, recorded(samples()))
    slow = planned(named, replace(PROFILE, decode_slowed=1.5, prefill_slowed=1.5), recorded(samples()))
    assert calm is not None
    assert slow is not None
    measured = compare(config, PROFILE, samples(), None, {"workload": "", "notes": []}, calm)["measured"]
    assert calm["tpot_s"]["p50"] == pytest.approx(measured["tpot_s"]["p50"], rel=0.1)
    assert calm["ttft_s"]["p50"] == pytest.approx(measured["ttft_s"]["p50"], rel=0.1)
    assert slow["ttft_s"]["p50"] > calm["ttft_s"]["p50"]


def test_a_record_is_a_trace_of_the_very_requests(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write_record(path, samples(8))
    arrivals = list(load_trace(path, Options()).arrivals)
    assert [(a.prompt, a.output) for a in arrivals] == [(a.prompt, a.output) for a in recorded(samples(8))]
    assert [a.at for a in arrivals] == pytest.approx([2.0 * n for n in range(8)])


def test_the_sizes_of_pools_are_those_that_workers_say() -> None:
    watch = Watch()
    lines = [
        f'baton_kv_{kind}_blocks{{model_name="m",worker="{role}-0",role="{role}"}} {value}'
        for role, total in (("prefill", 400), ("decode", 500))
        for kind, value in (("total", total), ("used", total / 4))
    ]
    watch.take("\n".join([*lines, ""]), watch.began + 3.0)
    assert with_blocks(PROFILE, None) == PROFILE
    found = with_blocks(PROFILE, watch)
    assert (found.prefill_blocks, found.decode_blocks) == (400, 500)
    assert watch.rows[0].at == pytest.approx(3.0)
    assert watch.rows[0].decode_blocks == pytest.approx(0.25)


def test_pools_that_share_a_machine_slow_each_other_by_their_shares_of_time() -> None:
    shared = replace(PROFILE, prefill_slowed=1.2, decode_slowed=1.5)
    slowed = shared.shared(prefill_busy=0.5, decode_busy=1.0)
    assert slowed.prefill == pytest.approx([1.2 * c for c in PROFILE.prefill])
    assert slowed.decode == pytest.approx([1.25 * c for c in PROFILE.decode])
    assert differ(PROFILE, slowed, 256, 8, 256) == pytest.approx(0.25)
    assert between(PROFILE, slowed).prefill == pytest.approx([1.1 * c for c in PROFILE.prefill])


def test_a_law_of_steps_is_fitted_around_the_batch_that_runs() -> None:
    """Flat up to 8 sequences, steep beyond: one line through all is wrong for both."""
    steps = tuple((float(n), 50.0 * n, 0.010 + 0.001 * max(0, n - 8)) for n in (1, 2, 4, 8, 16, 32, 64))
    found = replace(PROFILE, steps=steps)
    assert found.around(3.0).decode.seconds((1.0, 4.0, 200.0)) == pytest.approx(0.010, rel=0.01)
    assert found.around(60.0).decode.seconds((1.0, 64.0, 3200.0)) == pytest.approx(0.066, rel=0.1)
    assert PROFILE.around(3.0) == PROFILE
    assert between(found, found).steps == steps + steps


def test_a_record_that_is_read_again_is_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_record(path, samples(8))
    again = read_record(path)
    assert recorded(again) == recorded(samples(8))
    for one, other in zip(again, sorted(samples(8), key=lambda sample: sample.sent_s), strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s)
        assert one.tpot_s == pytest.approx(other.tpot_s)
        assert (one.warm_up, one.error, one.tokens) == (other.warm_up, other.error, other.tokens)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no record"):
        read_record(path)


def test_changes_are_read_as_they_are_written() -> None:
    changes = simulate.parse_changes(["decode-0@30s+20s", "prefill-1@1s"], ["prefill-1@1m+5s"], ["decode=3@500ms+30s"])
    assert changes == (
        Scale(0.5, "decode", 3, 30.0),
        Fail(1.0, "prefill-1", None),
        Fail(30.0, "decode-0", 20.0),
        Switch(60.0, "prefill-1", 5.0),
    )
    for wrong in ("decode-0", "decode-0@soon", "other-0@1s", "decode=1@1s"):
        with pytest.raises(ConfigError, match="--fail"):
            simulate.parse_changes([wrong], [], [])


def test_pools_that_follow_the_load_are_shown(config: Config) -> None:
    load = Load(config.workload, rate=20.0, shape="gamma", duration_s=200.0)
    wanted = simulate.Wanted(load, None, (), 1, False, True, None, autoscale=(6, 5.0))
    result = simulate.simulated(config, PROFILE, wanted)
    assert max(result["timeline"]["simulated"]["prefill_workers"]) > 1
    assert "Workers, simulated" in page(result)
    still = simulate.simulated(config, PROFILE, replace(wanted, autoscale=None))
    assert result["simulated"]["ttft_s"]["p50"] < 0.5 * still["simulated"]["ttft_s"]["p50"]
    assert "Workers, simulated" not in page(still)


def test_a_chart_has_round_ticks_and_says_when_it_has_nothing() -> None:
    line = Series("a <b>", "measured", [(0.0, 0.0), (10.0, 42.0), (float("nan"), 1.0)])
    text = chart("title", Axis("x"), Axis("y"), [line])
    assert ">40<" in text
    assert "a &lt;b&gt;" in text
    assert "nan" not in text
    assert "no data" in chart("title", Axis("x"), Axis("y", "log"), [Series("z", "a", [(1.0, 0.0)])])
