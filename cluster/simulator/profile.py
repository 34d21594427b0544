"""What a worker of each pool does in a second: measured (`measure.py`, or a file of it), or from the hardware's limits.

The roofline, with what serving engines reach of it (fits over published runs, mean errors 5 to 13 %):
- prefill: 2*P FLOP a token and 2*L*heads*head_dim*(e^2 - s^2) of attention, at 0.5 of the peak;
- decode: weights and KV are read at 1/1.07 of the bandwidth, 1.67 * 2*P FLOP a sequence at the peak, 43 us a layer and
  40 us a sequence for what is neither, on GPUs; terms add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from ...proto.errors import ConfigError
from ...proto.step_time import StepTime
from .. import hardware
from ..config import Config
from ..spec import pool, tightest
from .spec import Cluster, DecodePool, LayeredTransfer, Objectives, Overheads, PrefillPool, Rules

_MFU, _BYTES_MORE, _FLOPS_MORE = 0.5, 1.07, 1.67
_LAYER_S, _SEQUENCE_S = 42.6e-6, 39.8e-6  # on GPUs
_LINK_ALPHA_S, _LINK_BYTES_S = 0.4e-3, 25e9  # of a transfer where nothing is known of the link


@dataclass(frozen=True, slots=True)
class Profile:
    """`prefill_blocks`, `decode_blocks`: of a worker's KV pool. `source`: where it comes from, for the report."""

    source: str
    prefill: StepTime
    decode: StepTime
    prefill_blocks: int
    decode_blocks: int
    transfer: LayeredTransfer
    overheads: Overheads
    noise: float = 0.0
    prefill_slowed: float = 1.0  # time of a step with the other pool at work / alone, where both share a machine
    decode_slowed: float = 1.0

    def shared(self, prefill_busy: float, decode_busy: float) -> Profile:
        """The laws where the pools compute for these shares of the time."""
        first = 1 + (self.prefill_slowed - 1) * decode_busy
        second = 1 + (self.decode_slowed - 1) * prefill_busy
        prefill = StepTime(*(coefficient * first for coefficient in self.prefill))
        decode = StepTime(*(coefficient * second for coefficient in self.decode))
        return replace(self, prefill=prefill, decode=decode, prefill_slowed=1.0, decode_slowed=1.0)


_ADAPTER: TypeAdapter[Profile] = TypeAdapter(Profile)


def to_fields(profile: Profile) -> dict[str, Any]:
    """As YAML or JSON holds it."""
    return dict(_ADAPTER.dump_python(profile, mode="json"))


def load(path: Path) -> Profile:
    """The inverse. Raises ConfigError."""
    try:
        return _ADAPTER.validate_python(yaml.safe_load(path.read_text()))
    except (OSError, ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is no profile: {error}") from None


def roofline(config: Config) -> Profile:
    """From `hardware` and the model. Raises ConfigError where either is not known."""
    from ...engine.model_config import load_config
    from ...text.source import resolve

    found = hardware.find(config)
    if found is None:
        raise ConfigError("hardware: names no profile, so nothing can be predicted; name one or give --profile FILE")
    model = load_config(resolve(config.model_path))
    ranks = {role: pool(config, role).tensor_parallel for role in ("prefill", "decode")}
    size = _weight_bytes(config)
    row = 2 * model.layers * model.kv_heads * model.head_dim * _kv_bytes(config)
    gpu = config.pools.decode.device == "cuda"
    prefill_flops = found.flops * ranks["prefill"] * _MFU
    fresh = found.best_prefill(model, ranks["prefill"]) * _MFU  # tokens a second
    best = found.best_decode(model, ranks["decode"], 1)  # tokens a second with weights of one byte
    weights_s = _BYTES_MORE * size / best
    layers_s = model.layers * _LAYER_S if gpu else 0.0
    per_sequence = _FLOPS_MORE / found.best_prefill(model, ranks["decode"]) + (_SEQUENCE_S if gpu else 0.0)
    return Profile(
        f"roofline of {config.hardware} ({found.source}); nothing was measured",
        StepTime(layers_s, 1 / fresh, 2 * model.layers * model.heads * model.head_dim / prefill_flops),
        StepTime(weights_s + layers_s, per_sequence, _BYTES_MORE * row / (found.bandwidth * ranks["decode"])),
        blocks(config, "prefill", row),
        blocks(config, "decode", row),
        LayeredTransfer(_LINK_ALPHA_S, row / _LINK_BYTES_S, max(1, model.layers // config.engine.layer_group)),
        Overheads(),
    )


def blocks(config: Config, role: str, row: int) -> int:
    """Of a worker's pool, from its memory; `row`: bytes of KV of a token, over all ranks."""
    section = pool(config, role)
    memory = (section.memory if section.memory is not None else config.kv.memory) * section.tensor_parallel
    return max(1, memory // (row * block_size(config)))


def block_size(config: Config) -> int:
    """Tokens of a block of the decode pool."""
    section = config.pools.decode
    return section.block_size if section.block_size is not None else config.kv.block_size


def cluster_of(config: Config, profile: Profile, sample_s: float | None) -> Cluster:
    """What the configuration describes."""
    pools, router, clocks = config.pools, config.router, config.clocks
    return Cluster(
        PrefillPool(
            pools.prefill.replicas,
            profile.prefill,
            profile.prefill_blocks,
            pools.prefill.max_batch_tokens,
            pools.prefill.lookahead,
        ),
        DecodePool(pools.decode.replicas, profile.decode, profile.decode_blocks, pools.decode.max_sequences),
        block_size(config),
        profile.transfer,
        Rules(
            router.placement.prefill,
            router.placement.decode,
            router.placement.prefix_events,
            Objectives(tightest(config.slo.ttft), tightest(config.slo.tpot)),
            router.max_inflight,
            clocks.reserve,
            clocks.commit,
            clocks.request,
            router.attempts,
        ),
        profile.overheads,
        prefix_cache=config.engine.prefix_cache,
        noise=profile.noise,
        sample_s=sample_s,
    )


def _weight_bytes(config: Config) -> float:
    quantized = {"w8a8": 1.0, "int4": 0.5}.get(config.model.quantization)
    return quantized if quantized is not None else {"float32": 4.0, "bfloat16": 2.0}[config.model.dtype]


def _kv_bytes(config: Config) -> int:
    name = config.kv.dtype if config.kv.dtype != "auto" else config.model.dtype
    return {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}[name]
