"""Hardware profiles: what one rank of a machine can do at most, from `configs/hardware/` or a file of the user's.

The limits of a model on it follow. A decode step reads every weight once, so one stream gets at most
bandwidth / weight bytes tokens a second; prefill does 2 FLOPs per token and weight of the layers (the head runs for
the last token alone). With several ranks the one with the most weights decides.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from ..engine.partition import Range, head_ranges, query_ranges, split
from ..proto.errors import ConfigError
from .config import Config
from .config_base import Section
from .units import Bandwidth, Bytes, Duration, Flops

if TYPE_CHECKING:  # importing it costs a torch
    from ..engine.model_config import ModelConfig

CATALOGUE = Path(__file__).resolve().parent.parent / "configs" / "hardware"


class Efficiency(Section):
    """How much of the limits is reached: the coefficients of `planner/costs.py`, fitted with `planner/fitting.py`."""

    mfu: Annotated[float, Field(gt=0, le=1)] = 0.65  # share of the FLOPs in prefill
    all_reduce: Annotated[float, Field(ge=0)] = 2.3  # prefill's all-reduces: times what the link alone takes
    all_reduce_large: Annotated[float, Field(ge=0)] = 2.5  # so much more for the bytes beyond 32 MiB
    prefill_s: Annotated[float, Field(ge=0)] = 2e-3  # of a step, whatever it computes
    memory: Annotated[float, Field(ge=1)] = 1.19  # decode: bytes take so many times as long as at full bandwidth
    compute: Annotated[float, Field(ge=0)] = 1.29  # decode: FLOPs likewise
    layer_s: Annotated[float, Field(ge=0)] = 36.6e-6  # decode: of a layer
    rank_s: Annotated[float, Field(ge=0)] = 5.6e-6  # decode: of a layer, for each doubling of the ranks
    sequence_s: Annotated[float, Field(ge=0)] = 20.8e-6  # decode: of a sequence
    origin: str = "decode: vLLM on H100 and H200, 60 rows; prefill: Llama 2 70B on H100, 32 rows, without its launches"


class Fitted(Section):
    """A law of `proto/step_time.py` with what it was fitted to."""

    a: Annotated[float, Field(ge=0)]  # seconds, as b and c
    b: Annotated[float, Field(ge=0)]
    c: Annotated[float, Field(ge=0)]
    steps: Annotated[int, Field(ge=1)]
    tokens: list[int]  # least and most of a step: prompt tokens, or sequences
    context: list[int]  # least and most: tokens of a prompt, or of all sequences
    mean_error: float  # relative
    p90_error: float


class MeasuredTransfer(Section):
    """From the last token computed to the KV in the other pool: alpha + bytes / bandwidth."""

    alpha_s: Annotated[float, Field(ge=0)]
    bandwidth: Bandwidth


class Measured(Section):
    """One model on this machine."""

    model: str
    dtype: str
    quantization: str
    tensor_parallel: Annotated[int, Field(ge=1)]
    threads: Annotated[int, Field(ge=1)]
    prefill: Fitted
    decode: Fitted
    transfer: MeasuredTransfer | None = None
    version: str  # of baton
    device: str
    date: str


class Hardware(Section):
    """What one rank has: a GPU, or one core of a CPU."""

    memory: Bytes  # of the GPU, or of the whole machine
    bandwidth: Bandwidth  # reading memory, bytes per second
    flops: Flops  # dense bfloat16
    source: str  # where the numbers come from
    fp8_flops: Flops | None = None  # dense; None: it has none, and computes in bfloat16
    int8_flops: Flops | None = None
    link: Bandwidth | None = None  # to another GPU of the node, one way
    network: Bandwidth = 12.5e9  # of its own share of the node's network, one way
    network_latency: Duration = 25e-6
    node: Annotated[int, Field(ge=1)] = 8  # GPUs that `link` joins
    all_reduce: Literal["a100", "h100", "none"] = "none"  # whose small-message table resembles this; none: by formula
    price: Annotated[float, Field(gt=0)] | None = None  # dollars an hour, on demand: an example to be replaced
    efficiency: Efficiency = Efficiency()
    measured: list[Measured] = Field(default_factory=list)  # by `baton calibrate`

    def best_decode(self, model: ModelConfig, ranks: int, weight_size: int) -> float:
        """Upper limit of tokens per second of one stream; `weight_size`: bytes of one weight."""
        weights = _layer_weights(model, ranks) + model.hidden * _most(split(model.vocab_size, ranks))
        return self.bandwidth / (weights * weight_size)

    def best_prefill(self, model: ModelConfig, ranks: int) -> float:
        """Upper limit of prompt tokens per second."""
        return self.flops / (2 * _layer_weights(model, ranks))


def _layer_weights(model: ModelConfig, ranks: int) -> int:
    """Of the rank that has the most: the others wait for it."""
    owned = zip(
        query_ranges(model.heads, model.kv_heads, ranks),
        head_ranges(model.kv_heads, ranks),
        split(model.intermediate, ranks),
        strict=True,
    )
    fullest = max(
        2 * (query[1] - query[0] + kv[1] - kv[0]) * model.head_dim + 3 * (mlp[1] - mlp[0]) for query, kv, mlp in owned
    )
    return model.layers * model.hidden * fullest


def _most(ranges: tuple[Range, ...]) -> int:
    return max(stop - start for start, stop in ranges)


def find(config: Config) -> Hardware | None:
    """The profile that the configuration names, if it names one. Raises ConfigError: none there, or a bad one."""
    if config.hardware is None:
        return None
    beside = config.folder / Path(config.hardware).expanduser()
    path = beside if beside.is_file() else CATALOGUE / f"{config.hardware}.yaml"
    if not path.is_file():
        known = sorted(entry.stem for entry in CATALOGUE.glob("*.yaml"))
        near = difflib.get_close_matches(config.hardware, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"hardware: is {config.hardware}, neither a profile nor a file; {hint}")
    try:
        return Hardware.model_validate(yaml.safe_load(path.read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"hardware: {path}: {error}") from None
