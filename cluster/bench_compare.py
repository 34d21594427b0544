"""What was measured beside what the simulator says of the same requests: their recorded arrivals and lengths, replayed.

The result has the shape of a simulation's (`simulate.py`), with `measured` beside `simulated`, and `planned` where the
planner has an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..proto.errors import ConfigError
from .bench_stats import Sample, distribution, summarise
from .bench_watch import Watch
from .config import Config
from .simulate import frontier, operating_points, slo_limits, summarised
from .simulator import profile as profiles
from .simulator.profile import Profile
from .simulator.request import Arrival
from .simulator.results import Limits
from .simulator.run import Outcome, simulate
from .simulator.timeline import columns
from .simulator.traces import Trace

_POINTS = 200
_PASSES = 4  # until shares of time and batches agree with the laws that these lead to


def recorded(samples: Sequence[Sample]) -> list[Arrival]:
    """The requests as they came, in order, warm-up and failed ones included; from the first one's time on."""
    ordered = sorted(samples, key=lambda sample: sample.sent_s)
    began = ordered[0].sent_s if ordered else 0.0
    return [
        Arrival(sample.sent_s - began, sample.prompt_tokens, max(1, sample.tokens or sample.asked))
        for sample in ordered
    ]


def write_record(path: Path, samples: Sequence[Sample]) -> None:
    """One JSON line for each request, which `simulate --trace` and `bench --trace` read. Raises ConfigError."""
    ordered = sorted(samples, key=lambda sample: sample.sent_s)
    began = ordered[0].sent_s if ordered else 0.0
    lines = [
        json.dumps(
            {
                "at": round(sample.sent_s - began, 6),
                "prompt_tokens": sample.prompt_tokens,
                "output_tokens": sample.tokens or sample.asked,
                "ttft_s": sample.ttft_s,
                "tpot_s": sample.tpot_s,
                "e2e_s": sample.ended_s - sample.sent_s,
                "transfer_s": sample.exposed_s,
                "error": sample.error,
                "warm_up": sample.warm_up,
            }
        )
        for sample in ordered
    ]
    try:
        path.write_text("".join(line + "\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"--record: {path}: {error.strerror or error}") from None


def read_record(path: Path) -> list[Sample]:
    """What `write_record` wrote; of the arrivals the first and the last are known. Raises ConfigError."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [_sample(row) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: is no record: {error}") from None


def _sample(row: Mapping[str, Any]) -> Sample:
    at, tokens = row["at"], row["output_tokens"]
    arrivals: tuple[tuple[float, int], ...] = ()
    if row["ttft_s"] is not None:
        first = at + row["ttft_s"]
        more = [(first + row["tpot_s"] * (tokens - 1), tokens - 1)] if row["tpot_s"] is not None else []
        arrivals = ((first, 1), *more)
    return Sample(
        at,
        at + row["e2e_s"],
        arrivals,
        row["prompt_tokens"],
        row["error"],
        row["warm_up"],
        tokens,
        row["transfer_s"],
    )


def replayed(config: Config, found: Profile, samples: Sequence[Sample], seed: int = 0) -> Outcome:
    """The recorded requests in virtual time, warm-up left out of the latencies as it was when they were measured."""
    arrivals = recorded(samples)
    warm_up = sum(sample.warm_up for sample in samples)
    span = max(1e-3, arrivals[-1].at) if arrivals else 1.0
    busy, near = (0.0, 0.0), found
    passes = _PASSES if found.steps or (found.prefill_slowed, found.decode_slowed) != (1.0, 1.0) else 1
    for _ in range(passes):
        cluster = profiles.cluster_of(config, near.shared(*busy), span / 240)
        outcome = simulate(cluster, arrivals, seed=seed, warm_up=warm_up)
        near = found.around(_batch(outcome))
        shares = [
            sum(seconds for name, seconds in outcome.busy_s.items() if name.startswith(role))
            / max(1e-9, outcome.worker_s[role])
            for role in ("prefill", "decode")
        ]
        busy = (min(1.0, shares[0]), min(1.0, shares[1]))
    return outcome


def _batch(outcome: Outcome) -> float:
    """Mean sequences of a decode worker that has any."""
    running = [row.decode_running / max(1, row.decode_workers) for row in outcome.timeline if row.decode_running]
    return sum(running) / len(running) if running else 1.0


def measured(samples: Sequence[Sample], limits: Limits, watch: Watch | None) -> dict[str, Any]:
    """A summary as a simulation has it."""
    fields = summarise(samples, {metric: dict(by) for metric, by in limits.items()})
    good = [sample for sample in samples if not sample.warm_up and not sample.error]
    requests, rates, slo = fields["requests"], fields["throughput"], fields["slo"]
    share = slo["share_within_p99_limits"] if slo else None
    sends = [sample.sent_s for sample in samples if not sample.warm_up]
    length = max(sends) - min(sends) if sends else 0.0
    goodput = share * requests["measured"] / length if share is not None and length > 0 else None
    rows = watch.rows if watch is not None else []
    return {
        **{key: fields[key] for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "prompt_tokens", "output_tokens")},
        "requests": requests,
        "transfer_s": distribution([s.exposed_s for s in good if s.exposed_s is not None]),
        "share_within_p99_limits": share,
        "window_s": fields["window_s"],
        "throughput": {**rates, "goodput_per_s": goodput},
        "workers": {
            "prefill_blocks_peak": max((row.prefill_blocks for row in rows), default=None),
            "decode_blocks_peak": max((row.decode_blocks for row in rows), default=None),
        },
    }


def compare(
    config: Config,
    found: Profile,
    samples: Sequence[Sample],
    watch: Watch | None,
    load: Mapping[str, Any],
    planned: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything that the table, the JSON and the report show."""
    limits = slo_limits(config.slo)
    outcome = replayed(config, found, samples)
    good = [sample for sample in samples if not sample.warm_up and not sample.error]
    values = {
        "ttft": [v for s in good if (v := s.ttft_s) is not None],
        "tpot": [v for s in good if (v := s.tpot_s) is not None],
        "e2e": [s.ended_s - s.sent_s for s in good],
    }
    simulated = summarised(outcome, limits)
    simulated["transfer_s"] = _transfers(found, samples)
    return {
        "kind": "closed loop",
        "load": load,
        "profile": profiles.to_fields(found),
        "limits_s": limits,
        **({"planned": planned} if planned is not None else {}),
        "simulated": simulated,
        "measured": measured(samples, limits, watch),
        "cdf": {
            metric: {"simulated": quantiles(outcome.results.values(metric).tolist()), "measured": quantiles(seen)}
            for metric, seen in values.items()
        },
        "timeline": {
            "measured": columns(watch.rows if watch is not None else []),
            "simulated": columns(outcome.timeline),
        },
        "roofline": operating_points(found, outcome),
        "frontier": frontier(config, found, lambda times: _at_speed(samples, times), 0),
    }


def _at_speed(samples: Sequence[Sample], times: float) -> Trace:
    """The recorded requests, so many times as dense."""
    return Trace("recorded", (replace(a, at=a.at / times) for a in recorded(samples)), ())


def _transfers(found: Profile, samples: Sequence[Sample]) -> dict[str, float | int | None]:
    """Of the measured requests, by the profile: the part that is left when a prompt is computed."""
    lengths = [sample.prompt_tokens for sample in samples if not sample.warm_up and not sample.error]
    law = found.prefill
    return distribution([found.transfer.exposed_s(n, law.seconds((1.0, float(n), float(n * n)))) for n in lengths])


def quantiles(values: Sequence[float], points: int = _POINTS) -> list[float]:
    """Equally likely values, the least first."""
    import numpy as np

    return [] if not values else [float(v) for v in np.quantile(values, np.linspace(0, 1, points))]


def with_blocks(found: Profile, watch: Watch | None) -> Profile:
    """With the sizes of the pools that the workers said, where they did: nothing predicts them better."""
    if watch is None or not {"prefill", "decode"} <= watch.blocks.keys():
        return found
    return replace(found, prefill_blocks=watch.blocks["prefill"], decode_blocks=watch.blocks["decode"])
