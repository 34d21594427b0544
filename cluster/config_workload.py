"""Sections of the configuration about the load, what its users may expect, and what `plan` assumes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .config_base import Count, Section, Text
from .units import Bandwidth, Bytes, Duration, Rate


class Percentiles(Section):
    """Upper limits by percentile."""

    p50: Duration | None = None
    p90: Duration | None = None
    p99: Duration | None = None


class SLOSection(Section):
    """What users may expect; `bench` reports the share of requests that met it."""

    ttft: Percentiles = Percentiles()
    tpot: Percentiles = Percentiles()
    attainment: Annotated[float, Field(gt=0, lt=1)] | None = None  # share of requests within the strictest limits of
    # both at once; None: each percentile by itself


class Lengths(Section):
    """A distribution of token counts: log-normal with this mean and coefficient of variation (0: constant)."""

    mean: Annotated[float, Field(ge=1)]
    cv: Annotated[float, Field(ge=0, le=10)] = 0.0


class WorkloadSection(Section):
    """The load that `bench` makes and `plan` plans for."""

    rate: Rate = 2.0
    prompt_tokens: Lengths = Lengths(mean=512)
    output_tokens: Lengths = Lengths(mean=128)
    trace: Text | None = None  # for `plan`: a recorded load instead; relative to the configuration's folder
    prefix_share: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of prompt tokens that a prefix cache holds
    peak: Annotated[float, Field(ge=1, le=100)] = 1.0  # the busiest five minutes' load / the mean


class SpeculationGain(Section):
    """What `plan` assumes of speculation, where engine.speculation names a method."""

    accepted: Annotated[float, Field(ge=0, lt=1)] = 0.6  # chance that a guess stands, when those before it did
    cost: Annotated[float, Field(ge=0, lt=1)] = 0.05  # of a guess, in decode steps of one sequence


class PlanSection(Section):
    """What `plan` may choose from, and what it assumes where nothing was measured."""

    gpus: Count = 512  # at most, in both pools
    tensor_parallel: list[Count] = Field(default=[1, 2, 4, 8], min_length=1)
    weights: Literal["auto", "float32", "bfloat16", "fp8", "int8", "int4"] = "auto"  # auto: as `model` says
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9  # of a GPU's memory, for weights, activations and KV
    reserve: Bytes = 10**9  # of a GPU's memory, for the runtime and its workspaces
    bandwidth: Bandwidth | None = None  # of a GPU's memory, instead of the profile's
    link: Bandwidth | None = None  # over which KV travels, per rank and one way; None: the profile's network
    price: Annotated[float, Field(gt=0)] | None = None  # dollars a GPU and hour; None: the profile's
    speculation: SpeculationGain = SpeculationGain()
