"""What a worker of each pool does in a second: measured (`measure.py`, or a file of it), or by the planner's costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from ...proto.errors import ConfigError
from ...proto.step_time import StepTime, StepTimeFit
from ...router.placement.choose import Objectives
from ..config import Config
from ..planner.setup import site
from ..spec import tightest
from .spec import Cluster, DecodePool, LayeredTransfer, Overheads, PrefillPool, Rules

_BELOW, _ABOVE, _FEW = 6.0, 2.5, 4.0  # parts and times of the batch that a law is wanted for; sequences


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
    steps: tuple[tuple[float, float, float], ...] = ()  # of which `decode` is: sequences, their tokens, seconds

    def around(self, batch: float) -> Profile:
        """With the law of decode steps fitted to those of about so many sequences: a straight line from one sequence to
        the most is off by ten percent and more in between. Unchanged where too few are known."""
        least, most = batch / _BELOW, max(_FEW, _ABOVE * batch)
        near = [((1.0, n, tokens), seconds) for n, tokens, seconds in self.steps if least <= n <= most]
        if len({features[1] for features, _ in near}) < 3:
            return self
        fit = StepTimeFit()
        for features, seconds in near:
            fit.observe(features, seconds)
        law = fit.solved()
        return replace(self, decode=law) if law is not None else self

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


def predicted(config: Config) -> Profile:
    """By the planner's cost model: from a calibration of this model where the hardware's profile has one, else from
    sizes and limits. Raises ConfigError where either is not known."""
    found = site(config)
    prefill, decode = found.cost("prefill"), found.cost("decode")
    measured = prefill.measured is not None and decode.measured is not None
    alpha_s, token_s = prefill.message_s, prefill.transfer_bytes(1, decode.tp) / prefill.bandwidth_to(decode.tp)
    return Profile(
        f"{config.hardware}: {'calibrated' if measured else 'by sizes and limits, nothing was measured'}",
        prefill.prefill_law,
        decode.token_law,
        max(1, prefill.kv_blocks),
        max(1, decode.kv_blocks),
        LayeredTransfer(alpha_s, token_s, prefill.groups),
        Overheads(),
    )


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
        DecodePool(
            pools.decode.replicas,
            profile.decode,
            profile.decode_blocks,
            pools.decode.max_sequences,
            pools.decode.prompt_chunk,
        ),
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
            router.placement.disaggregation,
        ),
        profile.overheads,
        prefix_cache=config.engine.prefix_cache,
        noise=profile.noise,
        sample_s=sample_s,
    )
