"""Recorded workloads as streams of requests, in constant memory: what is known by its columns needs no name.

| kind | told by | times |
|---|---|---|
| Azure 2023, 2024, multimodal 2025 | `TIMESTAMP,ContextTokens,GeneratedTokens` | dates, to 100 ns |
| BurstGPT | `Timestamp,Model,Request tokens,Response tokens` | seconds; answers of 0 tokens failed and are skipped |
| Mooncake | JSON lines with `hash_ids`, each of 512 tokens | milliseconds; rounded ones are spread again |
| ServeGen | `pool,t_seconds,total_rate_req_s`: rates alone | Poisson in each window, with lengths of another trace |
| lengths alone | `num_prefill_tokens,num_decode_tokens` and the like | Poisson |
| plain | `at`, `prompt_tokens`, `output_tokens`, or usual other names for them; CSV or JSON lines | seconds |
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ...proto.errors import ConfigError
from . import synthetic
from .request import Arrival
from .synthetic import Draw

_HASHED = 512  # tokens of a Mooncake block
_LOOKED_AT = 400  # stamps, to see whether they are rounded
_ROUNDINGS_S = (3.0, 1.0)  # that are recognised, the coarsest first
_SLACK_S = 0.005  # by which rounded stamps may be off
_TIMES = ("at", "arrival_s", "arrived_at", "timestamp_s", "sent_s")
_PROMPTS = ("prompt_tokens", "input_tokens", "contexttokens", "request tokens", "input_length", "num_prefill_tokens")
_OUTPUTS = ("output_tokens", "generatedtokens", "response tokens", "output_length", "num_decode_tokens")


@dataclass(frozen=True, slots=True)
class Options:
    """`speed`: times as fast, which keeps every request and with them the prefix hits. `draw` and `rate` are for traces
    that do not say lengths or times. `jitter_s`: None spreads rounded stamps, 0 never does. `contents`: prompts get
    tokens, where the trace tells what they share."""

    speed: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    requests: int | None = None
    jitter_s: float | None = None
    seed: int = 0
    rate: float = 1.0
    draw: Draw | None = None
    pool: str | None = None  # of ServeGen
    contents: bool = True


@dataclass(frozen=True, slots=True)
class Trace:
    """`notes`: what was done to it, for the report. `named`: prompts have contents."""

    kind: str
    arrivals: Iterator[Arrival]
    notes: tuple[str, ...]
    named: bool = False


def load(path: Path, options: Options) -> Trace:
    """The requests of a file in order of time, from 0 s on. Raises ConfigError naming the line that makes no sense."""
    try:
        with path.open() as file:
            first = file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not first:
        raise ConfigError(f"{path}: is empty")
    rows = _json_rows(path) if first.startswith("{") else _csv_rows(path)
    head = next(rows, None)
    if head is None:
        raise ConfigError(f"{path}: has a heading and no request")
    trace = _trace(path, head, itertools.chain([head], rows), options)
    return Trace(trace.kind, _cut(trace.arrivals, options), (*trace.notes, *_said(options)), trace.named)


def lengths_of(path: Path, most: int = 1_000_000) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request of a trace."""
    arrivals = load(path, Options(requests=most, contents=False)).arrivals
    return [(arrival.prompt, arrival.output) for arrival in arrivals]


def _trace(path: Path, head: Row, rows: Iterator[Row], options: Options) -> Trace:
    if "total_rate_req_s" in head.fields:
        return _rates(rows, options)
    if "hash_ids" in head.fields:
        return _mooncake(rows, options)
    names = {
        what: next((name for name in known if name in head.fields), None)
        for what, known in (("prompt", _PROMPTS), ("output", _OUTPUTS), ("at", _TIMES))
    }
    prompt, output, at = names["prompt"], names["output"], names["at"]
    if prompt is None or output is None:
        raise ConfigError(
            f"{path}: no column of prompt and output tokens among {', '.join(head.fields)}; "
            f"known are {', '.join(_PROMPTS)} and {', '.join(_OUTPUTS)}"
        )
    lengths = ((row, row.count(prompt), row.count(output)) for row in rows)
    if at is None and "timestamp" in head.fields:
        text = str(head.fields["timestamp"])
        if re.match(r"\d{4}-\d\d-\d\d", text):
            times = (Arrival(_date(row), p, o) for row, p, o in lengths if o > 0)
            return Trace("azure", _from_zero(times), ())
        kind, at = ("burstgpt" if "request tokens" in head.fields else "plain"), "timestamp"
        timed = (Arrival(row.number(at), p, o) for row, p, o in lengths if o > 0)
        return Trace(kind, _from_zero(timed), ("requests without an answer are left out",))
    if at is None:
        rng = random.Random(options.seed)
        drawn = zip(synthetic.poisson(options.rate, rng), lengths, strict=False)
        made = (Arrival(now, p, max(1, o)) for now, (_, p, o) in drawn)
        return Trace("lengths", made, (f"the file has no times: Poisson arrivals, {options.rate:g}/s",))
    return Trace("plain", _from_zero(Arrival(row.number(at), p, max(1, o)) for row, p, o in lengths), ())


# ---- kinds ---------------------------------------------------------------------------------------------------------


def _mooncake(rows: Iterator[Row], options: Options) -> Trace:
    ahead = list(itertools.islice(rows, _LOOKED_AT))
    stamps = {row.number("timestamp") / 1000 for row in ahead}
    spread = options.jitter_s if options.jitter_s is not None else _rounding(stamps)
    rng = random.Random(options.seed)
    arrivals = _spread((_hashed(row, options) for row in itertools.chain(ahead, rows)), spread, rng)
    notes = (f"stamps are rounded to {spread:g} s: spread uniformly over that",) if spread else ()
    return Trace("mooncake", arrivals, notes, named=options.contents)


def _hashed(row: Row, options: Options) -> Arrival:
    tokens, ids = row.count("input_length"), row.fields["hash_ids"]
    contents = None
    if options.contents:
        contents = array("q")
        for block in ids:
            contents.extend(array("q", [block]) * _HASHED)
        if len(contents) < tokens:
            raise row.mistake(f"{len(ids)} hash_ids of {_HASHED} tokens are less than its input_length {tokens}")
        contents = contents[:tokens]
    return Arrival(row.number("timestamp") / 1000, tokens, max(1, row.count("output_length")), contents)


def _rounding(stamps: set[float]) -> float:
    """Seconds to which they all are rounded; 0: to none that is known."""
    coarse = (step for step in _ROUNDINGS_S if all(abs(stamp - _snapped(stamp, step)) < _SLACK_S for stamp in stamps))
    return next(coarse, 0.0) if len(stamps) > 1 else 0.0


def _snapped(stamp: float, step: float) -> float:
    return round(stamp / step) * step if step else stamp


def _spread(arrivals: Iterator[Arrival], over_s: float, rng: random.Random) -> Iterator[Arrival]:
    """Those of one stamp at random within so many seconds of it."""
    for stamp, same in itertools.groupby(arrivals, key=lambda arrival: _snapped(arrival.at, over_s)):
        if not over_s:
            yield from same
            continue
        for at, arrival in sorted(((stamp + rng.random() * over_s, a) for a in same), key=lambda pair: pair[0]):
            yield Arrival(at, arrival.prompt, arrival.output, arrival.contents, arrival.session)


def _rates(rows: Iterator[Row], options: Options) -> Trace:
    """Windows without a rate are missing, not idle: the one before them goes on."""
    windows: list[tuple[float, float]] = []
    pools: dict[str, None] = {}
    for row in rows:
        pool = str(row.fields["pool"])
        pools[pool] = None
        if pool == (options.pool or pool) and (options.pool or pool == next(iter(pools))):
            rate = row.number("total_rate_req_s")
            windows.append((row.number("t_seconds"), rate if rate > 0 or not windows else windows[-1][1]))
    if not windows:
        raise ConfigError(f"--trace-pool: is {options.pool}; there are {', '.join(pools)}")
    if options.draw is None:
        raise ConfigError("a trace of rates needs lengths: workload.prompt_tokens and output_tokens, or another trace")
    rng = random.Random(options.seed)
    times = synthetic.stepwise(windows, rng)
    name = options.pool or next(iter(pools))
    return Trace("servegen", synthetic.requests(times, options.draw), (f"rates of {name}: Poisson in each window",))


# ---- rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One line; names of columns in lower case."""

    path: Path
    line: int
    fields: Mapping[str, Any]

    def mistake(self, text: str) -> ConfigError:
        """Names the line."""
        return ConfigError(f"{self.path}:{self.line}: {text}")

    def number(self, name: str) -> float:
        """Raises ConfigError."""
        try:
            return float(self.fields[name])
        except (KeyError, TypeError, ValueError):
            raise self.mistake(f"{name} is {self.fields.get(name)!r}, not a number") from None

    def count(self, name: str) -> int:
        """Tokens, at least 0. Raises ConfigError."""
        value = self.number(name)
        if value < 0 or value != int(value):
            raise self.mistake(f"{name} is {self.fields[name]!r}, not a count of tokens")
        return int(value)


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="") as file:
        reader = csv.reader(file)
        names = [name.strip().lower() for name in next(reader, [])]
        for line, values in enumerate(reader, 2):
            if values:
                yield Row(path, line, dict(zip(names, values, strict=False)))


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open() as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{path}:{line}: {error}") from None
            if not isinstance(fields, dict):
                raise ConfigError(f"{path}:{line}: is no table of fields")
            yield Row(path, line, {name.lower(): value for name, value in fields.items()})


def _date(row: Row) -> float:
    """Seconds; digits beyond microseconds are cut."""
    text = re.sub(r"(\.\d{6})\d+", r"\1", str(row.fields["timestamp"]).strip())
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise row.mistake(f"timestamp: {error}") from None


def _from_zero(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """The first one at 0. Who is out of order by clock noise comes when the one before it does."""
    began: float | None = None
    now = 0.0
    for arrival in arrivals:
        began = arrival.at if began is None else began
        now = max(now, arrival.at - began)
        yield Arrival(now, max(1, arrival.prompt), arrival.output, arrival.contents, arrival.session)


def _cut(arrivals: Iterator[Arrival], options: Options) -> Iterator[Arrival]:
    """The window that was asked for, from 0 on, at its speed."""
    end = None if options.duration_s is None else options.start_s + options.duration_s
    taken = 0
    for arrival in arrivals:
        if (end is not None and arrival.at >= end) or (options.requests is not None and taken >= options.requests):
            return
        if arrival.at >= options.start_s:
            taken += 1
            at = (arrival.at - options.start_s) / options.speed
            yield Arrival(at, arrival.prompt, arrival.output, arrival.contents, arrival.session)


def _said(options: Options) -> list[str]:
    said = []
    if options.speed != 1:
        said.append(f"{options.speed:g} times as fast as recorded")
    if options.start_s or options.duration_s is not None:
        end = "" if options.duration_s is None else f" to {options.start_s + options.duration_s:g}"
        said.append(f"seconds {options.start_s:g}{end} of the trace")
    return said
