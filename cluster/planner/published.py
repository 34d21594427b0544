"""Measurements that others published, as rows of one table, and what the planner's laws make of them.

Columns: source, model, dtype, gpu, n_gpu, tp, mode, batch_or_concurrency, isl, osl, metric, value, unit, notes. A row
that the laws do not cover (experts, disaggregated closed loops, lengths that are not recorded) is left out and counted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import yaml

from ...proto.errors import ConfigError
from ..hardware import CATALOGUE, Efficiency, Hardware
from .all_reduce import ring_s
from .costs import CostModel, Options
from .fitting import Matrix, non_negative
from .model_shape import Shape, find

_MODELS = {
    "qwen3-32b": "qwen3-32b",
    "llama-3.1-70b": "llama-3.1-70b",
    "llama-3.1-8b": "llama-3.1-8b",
    "llama2-70b": "llama-2-70b",
    "llama-2-70b": "llama-2-70b",
    "llama-2-7b": "llama-2-7b",
    "opt-13b": "opt-13b",
    "opt-66b": "opt-66b",
    "opt-175b": "opt-175b",
}
_GPUS = {"H100-SXM": "h100-sxm", "H200-SXM": "h200-sxm", "A100-SXM": "a100-sxm-80", "RTX4090": "rtx-4090"}
_LAUNCH_BOUND = 512  # prompt tokens below which eager engines wait for their own launches
_NOMINAL = 0.9  # real lengths / nominal ones, of runs with a random range ratio of 0.8
_COLUMNS = ("source", "model", "dtype", "gpu", "tp", "n_gpu", "batch_or_concurrency", "isl", "osl", "metric", "value")


@dataclass(frozen=True, eq=False)
class Row:
    """One measurement that a law covers. `value`: seconds, or tokens of KV."""

    engine: str
    source: str
    model: str
    gpu: str
    kind: str  # tpot | prefill | kv
    cost: CostModel
    batch: float
    prompt: float
    output: float
    value: float

    @property
    def group(self) -> tuple[str, str, str]:
        """What is fitted together: an engine on a GPU."""
        return (self.kind, self.engine, self.gpu)

    @property
    def context(self) -> float:
        """Mean tokens of a sequence while it runs."""
        return self.prompt + self.output / 2

    def features(self) -> list[float]:
        """Of the law's coefficients; the last one is known and has the coefficient 1."""
        return self._tpot() if self.kind == "tpot" else self._prefill()

    def _tpot(self) -> list[float]:
        exact = self._with(memory=1.0, compute=1.0, layer_s=1.0, rank_s=1.0, sequence_s=1.0)
        terms = exact.decode_terms(self.batch, self.batch * self.context)
        layers, ranks = self.cost.shape.layers, np.log2(self.cost.tp)
        shared = 1 + self.prompt / max(1.0, self.output)  # prompts are computed in the same steps
        reading = terms.weights + terms.kv
        prompts = self.batch * self.prompt / max(1.0, self.output) * self.cost.shape.hidden * 2  # bytes
        reduced = 2 * layers * ring_s(prompts, self.cost.tp, float(self.cost.hardware.link or 1))
        return [reading, terms.compute * shared, layers, layers * float(ranks), self.batch, reduced, terms.all_reduce]

    def _prefill(self) -> list[float]:
        exact = self._with(mfu=1.0, all_reduce=1.0, all_reduce_large=0.0, prefill_s=0.0)
        terms = exact.prefill_terms(self.prompt, 0.0, int(self.batch))
        large = self._with(all_reduce=0.0, all_reduce_large=1.0).prefill_terms(self.prompt, 0.0, int(self.batch))
        return [1.0, terms.compute + terms.attention, terms.all_reduce, large.all_reduce, 0.0]

    def _with(self, **changes: float) -> CostModel:
        fitted = Efficiency().model_copy(update=changes)
        hardware = self.cost.hardware.model_copy(update={"efficiency": fitted})
        return replace(self.cost, hardware=hardware)

    def roofline(self) -> float:
        """Reading alone, at the whole bandwidth: what a bandwidth roofline says of a token."""
        return self._tpot()[0]


def fit(rows: Sequence[Row]) -> Matrix:
    """The law's coefficients from these rows, all of one kind; reading takes at least as long as at full bandwidth."""
    features = np.array([row.features() for row in rows])
    seconds = np.array([row.value for row in rows])
    if rows[0].kind == "tpot":
        return np.append(non_negative(features[:, :-1], seconds, [1.0, 1.0, 0, 0, 0, 1.0], features[:, -1]), 1.0)
    return np.append(non_negative(features[:, :-1], seconds, [0.0, 1.0, 0.0, 0.0]), 1.0)


def predict(row: Row, coefficients: Matrix) -> float:
    """Seconds."""
    return float(np.dot(row.features(), coefficients))


def read(path: Path) -> tuple[list[Row], dict[str, int]]:
    """The rows that the laws cover, and how many were left out for which reason. Raises ConfigError: no such table."""
    try:
        with path.open(newline="") as file:
            table = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (table.fieldnames or [])]
            if missing:
                raise ConfigError(f"--data: {path} lacks the columns {', '.join(missing)}")
            lines = list(table)
    except OSError as error:
        raise ConfigError(f"--data: {path}: {error.strerror}") from None
    rows: list[Row] = []
    out: dict[str, int] = {}
    for line in lines:
        found = _row(line)
        if isinstance(found, Row):
            rows.append(found)
        else:
            out[found] = out.get(found, 0) + 1
    return rows, out


def _row(line: dict[str, str]) -> Row | str:
    kind = {"tpot_mean": "tpot", "prompt_time": "prefill", "kv_capacity_tokens": "kv"}.get(line["metric"])
    if kind is None:
        return f"metric {line['metric']}"
    name = next(
        (known for known in _MODELS if known in line["model"].lower() and "nvfp4" not in line["model"].lower()), ""
    )
    gpu = next((known for known in _GPUS if line["gpu"].startswith(known)), "")
    if not name or not gpu:
        return f"model or GPU without a law: {line['model']} on {line['gpu']}"
    if "DISAGG" in line.get("notes", ""):
        return "disaggregated, with an inferred concurrency"
    try:
        tp, gpus, value = int(line["tp"]), int(line["n_gpu"]), float(line["value"])
        batch, prompt, output = (float(line[key] or 0) for key in ("batch_or_concurrency", "isl", "osl"))
    except ValueError:
        return "not numbers: an open loop, or lengths in words" if kind != "kv" else "no degree of parallelism"
    notes = line.get("notes", "")
    if kind == "prefill" and batch * prompt < _LAUNCH_BOUND:
        return f"fewer than {_LAUNCH_BOUND} prompt tokens, launch-bound"
    real = _NOMINAL if "InferenceMAX" in notes else 1.0
    weights = "fp8" if line["dtype"].startswith("fp8") else "bfloat16"
    engine = _engine(line["source"], notes)
    kv = "bfloat16"
    options = Options(weights=weights, kv=kv, max_batch_tokens=2048 if kind == "kv" else 10**6)
    cost = CostModel(_shape(_MODELS[name]), _hardware(_GPUS[gpu]), tp, options)
    seconds = value if kind == "kv" else value / 1000
    replicas = max(1, gpus // tp)
    return Row(
        engine, line["source"], name, _GPUS[gpu], kind, cost, batch / replicas, prompt * real, output * real, seconds
    )


def _engine(source: str, notes: str) -> str:
    found = re.search(r"backend=(\w+)", notes)
    return found[1] if found else source


@cache
def _shape(name: str) -> Shape:
    return find(name, Path())


@cache
def _hardware(name: str) -> Hardware:
    return Hardware.model_validate(yaml.safe_load((CATALOGUE / f"{name}.yaml").read_text()))


def split(rows: Sequence[Row]) -> Iterator[tuple[list[Row], list[Row]]]:
    """(fitted to, tested on) for each group, by turns in the order of the settings, both ways; repeats of one setting
    stay on one side."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for group in groups.values():
        settings = sorted({_setting(row) for row in group})
        side = {setting: number % 2 for number, setting in enumerate(settings)}
        for turn in (0, 1):
            taught = [row for row in group if side[_setting(row)] == turn]
            tested = [row for row in group if side[_setting(row)] != turn]
            if taught and tested:
                yield taught, tested


def _setting(row: Row) -> tuple[str, str, int, float, float, float]:
    return (row.model, row.cost.options.weights, row.cost.tp, row.prompt, row.output, row.batch)


def left_out(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row], list[Row]]]:
    """(model, fitted to all others of its engine, tested on it), for engines with several models."""
    for engine in sorted({row.engine for row in rows}):
        mine = [row for row in rows if row.engine == engine]
        models = sorted({row.model for row in mine})
        for model in models if len(models) > 1 else []:
            yield (
                f"{engine}: {model}",
                [row for row in mine if row.model != model],
                [row for row in mine if row.model == model],
            )


def predict_all(taught: Sequence[Row], tested: Sequence[Row]) -> list[float]:
    """What the law of the rows `taught` says of those `tested`, all of one kind."""
    if taught[0].kind == "kv":
        share = _memory_share(taught)
        return [_tokens(row, share) for row in tested]
    law = fit(taught)
    return [predict(row, law) for row in tested]


def _memory_share(rows: Sequence[Row]) -> float:
    """(weights + KV) / memory of these rows: the share that the engine uses."""
    used = [
        (row.value * row.cost.kv_rank_bytes + row.cost.weight_bytes / row.cost.tp) / float(row.cost.hardware.memory)
        for row in rows
    ]
    return float(np.mean(used))


def _tokens(row: Row, share: float) -> float:
    """Of KV, in whole blocks, with this share of the memory and nothing else held."""
    cost = row.cost
    size = cost.options.block_size
    room = share * float(cost.hardware.memory) - cost.weight_bytes / cost.tp
    return float(max(1, int(room // (size * cost.kv_rank_bytes))) * size)
