"""Traces are known by their columns and read as streams; loads that are made up have the shape that was asked for."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest
from baton.cluster.config_workload import Lengths, WorkloadSection
from baton.cluster.simulator import synthetic
from baton.cluster.simulator.traces import Options, load
from baton.cluster.simulator.workload import Load
from baton.proto.errors import ConfigError

SAMPLES = Path(__file__).parent / "data" / "traces"


@pytest.mark.parametrize(
    ("name", "kind", "first", "last"),
    [
        ("azure_2023_conv.csv", "azure", (0.0, 374, 44), 20),
        ("azure_2024_conv.csv", "azure", (0.0, 1000, 12), 4),
        ("burstgpt.csv", "burstgpt", (0.0, 472, 18), 4),
        ("plain.csv", "plain", (0.0, 100, 5), 3),
        ("plain.jsonl", "plain", (0.0, 10, 3), 2),
    ],
)
def test_each_kind_is_known_by_its_columns(name: str, kind: str, first: tuple[float, int, int], last: int) -> None:
    trace = load(SAMPLES / name, Options())
    arrivals = list(trace.arrivals)
    assert trace.kind == kind
    assert (arrivals[0].at, arrivals[0].prompt, arrivals[0].output) == first
    assert len(arrivals) == last
    assert [a.at for a in arrivals] == sorted(a.at for a in arrivals)
    assert all(a.prompt > 0 and a.output > 0 for a in arrivals)


def test_dates_are_read_to_the_microsecond() -> None:
    arrivals = list(load(SAMPLES / "azure_2023_conv.csv", Options()).arrivals)
    assert arrivals[1].at == pytest.approx(4.314579)


def test_mooncake_stamps_are_spread_over_their_rounding_and_prompts_share_what_their_blocks_do() -> None:
    trace = load(SAMPLES / "mooncake.jsonl", Options())
    arrivals = list(trace.arrivals)
    assert trace.named
    assert "spread uniformly" in trace.notes[0]
    assert len({a.at for a in arrivals}) == len(arrivals)
    raw = list(load(SAMPLES / "mooncake.jsonl", Options(jitter_s=0.0)).arrivals)
    assert len({a.at for a in raw}) < len(raw)
    for spread in arrivals:
        assert spread.contents is not None
        assert len(spread.contents) == spread.prompt
    shared = [a.contents[:512] for a in arrivals if a.contents is not None and a.prompt > 512]
    assert all(list(one) == [0] * 512 for one in shared)


def test_rates_become_poisson_arrivals_window_by_window() -> None:
    trace = load(SAMPLES / "servegen.csv", Options(draw=lambda: (7, 3), pool="language/m-small"))
    counts = [0, 0, 0]
    for arrival in itertools.islice(trace.arrivals, 10**5):
        counts[int(arrival.at // 600)] += 1
    assert counts == pytest.approx([600 * 2.0, 600 * 2.0, 600 * 8.0], rel=0.08)  # the second one was missing
    with pytest.raises(ConfigError, match="language/m-large"):
        load(SAMPLES / "servegen.csv", Options(draw=lambda: (7, 3), pool="none"))
    with pytest.raises(ConfigError, match="needs lengths"):
        load(SAMPLES / "servegen.csv", Options())


def test_a_window_begins_at_zero_and_speed_changes_times_alone() -> None:
    whole = list(load(SAMPLES / "azure_2023_conv.csv", Options()).arrivals)
    part = list(load(SAMPLES / "azure_2023_conv.csv", Options(start_s=5.0, duration_s=10.0, speed=2.0)).arrivals)
    inside = [a for a in whole if 5.0 <= a.at < 15.0]
    assert [(a.prompt, a.output) for a in part] == [(a.prompt, a.output) for a in inside]
    assert [a.at for a in part] == pytest.approx([(a.at - 5.0) / 2 for a in inside])


def test_lengths_without_times_come_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "30,4\n" * 2000)
    trace = load(path, Options(rate=5.0))
    arrivals = list(trace.arrivals)
    assert arrivals[-1].at == pytest.approx(400, rel=0.1)
    assert "no times" in trace.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("at,prompt_tokens\n1,2\n", "no column of prompt and output tokens"),
        ("at,prompt_tokens,output_tokens\n", "no request"),
        ("at,prompt_tokens,output_tokens\n1,many,2\n", ":2: prompt_tokens is 'many'"),
        ("at,prompt_tokens,output_tokens\n1,3,2\nsoon,3,2\n", ":3: at is 'soon'"),
        ("at,prompt_tokens,output_tokens\n1,-3,2\n", ":2: prompt_tokens is '-3'"),
        ('{"at": 1, "prompt_tokens": 3, "output_tokens": 2}\n[]\n', ":2: is no table"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(load(path, Options()).arrivals)


def _cv(times: list[float]) -> float:
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.pstdev(gaps) / statistics.mean(gaps)


def test_bursts_and_waves_have_the_rate_and_spread_that_were_asked_for() -> None:
    steady = list(itertools.islice(synthetic.poisson(10.0, random.Random(1)), 20_000))
    bursts = list(itertools.islice(synthetic.gamma(10.0, 3.0, random.Random(1)), 40_000))
    assert (len(steady) / steady[-1], _cv(steady)) == pytest.approx((10.0, 1.0), rel=0.05)
    assert (len(bursts) / bursts[-1], _cv(bursts)) == pytest.approx((10.0, 3.0), rel=0.08)
    wave = list(itertools.takewhile(lambda at: at < 1000, synthetic.diurnal(20.0, 0.6, 1000.0, random.Random(2))))
    middle = sum(400 <= at < 600 for at in wave) / 200
    edges = sum(at < 100 or at >= 900 for at in wave) / 200
    assert len(wave) / 1000 == pytest.approx(20.0, rel=0.05)
    assert middle / edges == pytest.approx(1.56 / 0.44, rel=0.15)


def test_a_load_is_the_same_each_time_it_is_opened() -> None:
    section = WorkloadSection(prompt_tokens=Lengths(mean=100.0, cv=1.0), output_tokens=Lengths(mean=9.0))
    made = Load(section, requests=50, seed=7)
    assert list(made.open().arrivals) == list(made.open().arrivals)
    fast = list(made.faster(2.0).open().arrivals)
    slow = list(made.open().arrivals)
    assert [a.prompt for a in fast] == [a.prompt for a in slow]
    assert [2 * a.at for a in fast] == pytest.approx([a.at for a in slow])
    with pytest.raises(ConfigError, match="--start"):
        Load(section, start_s=3.0).open()
