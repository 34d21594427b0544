"""What the planner's closed forms say of the configuration's own pools under recorded requests: column `planned`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from typing import Any

from ..proto.errors import ConfigError
from ..router.placement.disaggregation import NEVER
from .config import Config
from .hardware import Fitted, Measured, MeasuredTransfer
from .planner.costs import CostModel
from .planner.estimate import Latency
from .planner.plans import Plan
from .planner.setup import site
from .planner.workload import Workload, from_requests, slo_of
from .simulator.profile import Profile
from .simulator.request import Arrival


def planned(config: Config, profile: Profile, arrivals: Sequence[Arrival]) -> dict[str, Any] | None:
    """A summary as a simulation has it, with the profile's laws; None where there is too little to say something of, or
    the hardware is not named."""
    if len(arrivals) < 2 or config.hardware is None:
        return None
    requests = [(arrival.at, arrival.prompt, arrival.output) for arrival in arrivals]
    try:
        workload = from_requests(requests, 0.0, "the recorded requests")
        found, laws = site(config), _shared(profile, workload)
        costs = [_with_laws(config, found.cost(role), laws, role) for role in ("prefill", "decode")]
        replicas = (config.pools.prefill.replicas, config.pools.decode.replicas)
        whole = config.router.placement.disaggregation == NEVER
        plan = Plan("aggregated" if whole else "disaggregated", costs[0], costs[1], replicas, workload, slo_of(config))
    except ConfigError:
        return None
    stable, messages = plan.binding is None, 2 if whole else 4
    return {
        "requests": {"completed": len(arrivals)},
        "ttft_s": _percentiles(plan.ttft, profile.overheads.router_s + messages * profile.overheads.message_s),
        "tpot_s": _percentiles(plan.tpot, 0.0),
        "transfer_s": {"mean": _finite(plan.exposed)},
        "share_within_p99_limits": plan.attained if plan.slo.ttft or plan.slo.tpot else None,
        "throughput": {
            "requests_per_s": workload.rate if stable else None,
            "output_tokens_per_s": workload.rate * workload.output.mean if stable else None,
            "goodput_per_s": workload.rate * plan.attained if stable else None,
        },
    }


def _shared(profile: Profile, workload: Workload) -> Profile:
    """The laws where each pool is slowed by the other's share of the time: that of its prompts at a prefill worker, and
    at a decode worker that in which its batch, of a Poisson number of sequences, is not empty."""
    prompt, output = workload.prompt, workload.output
    prefill_busy = workload.rate * profile.prefill.seconds((1.0, prompt.mean, prompt.square))
    batch = workload.rate * output.mean * profile.decode.seconds((1.0, 1.0, prompt.mean + output.mean / 2))
    return profile.shared(min(1.0, prefill_busy), 1 - math.exp(-batch))


def _with_laws(config: Config, cost: CostModel, profile: Profile, role: str) -> CostModel:
    """The profile is a calibration of this very cluster."""
    blocks = profile.prefill_blocks if role == "prefill" else profile.decode_blocks
    memory = blocks * cost.options.block_size * cost.kv_rank_bytes
    token_s = profile.transfer.token_s
    bandwidth = cost.kv_token_bytes / token_s if token_s > 0 else 1e15
    measured = Measured(
        model=cost.shape.name,
        dtype=config.model.dtype,
        quantization=config.model.quantization,
        tensor_parallel=cost.tp,
        threads=1,
        prefill=_fitted(*profile.prefill),
        decode=_fitted(*profile.decode),
        transfer=MeasuredTransfer.model_construct(alpha_s=profile.transfer.alpha_s, bandwidth=bandwidth),
        version=version("baton"),
        device=config.pools.decode.device,
        date=date.today().isoformat(),
    )
    whole = config.router.placement.disaggregation == NEVER
    step = config.pools.decode.prompt_chunk if whole else cost.options.max_batch_tokens
    return replace(cost, measured=measured, options=replace(cost.options, kv_memory=memory, max_batch_tokens=step))


def _fitted(a: float, b: float, c: float) -> Fitted:
    return Fitted(a=a, b=b, c=c, steps=1, tokens=[1, 1 << 20], context=[1, 1 << 30], mean_error=0.0, p90_error=0.0)


def _percentiles(latency: Latency, more_s: float) -> dict[str, float | None]:
    found = {f"p{round(100 * share)}": _finite(value + more_s) for share, value in latency.percentiles.items()}
    return {"mean": _finite(latency.mean + more_s), **found}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
