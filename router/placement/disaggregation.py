"""Where a leg's prompt is computed: on a prefill worker, or on the decode worker that will decode it. Pure.

`conditional` compares the delays that the two ways cause, in seconds summed over everybody they concern, by the laws of
both workers' steps:

- away: the leg's TTFT at its prefill worker; what its KV is late for the second token; and for each prompt that is
  there already, what of this one runs before it ends: twice, because as many will come while these wait (Little's law).
- here: the prompt's new tokens run in chunks beside the batch, so the TTFT is that many steps of the batch and the
  chunks themselves; and every running stream waits for the chunks.

So a prompt is computed here when its uncached part is short, the prefill worker is busy, or few streams run here. One
step's chunk must leave the TPOT objective room, where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...proto.step_time import StepTime
from .latency_aware import predict_tpot_s, predict_ttft_s
from .policy import Candidate, Demand

# (demand, prefill worker, decode worker, the same as a place for prompts, seconds that KV is late, TPOT objective)
OnDecode = Callable[[Demand, Candidate, Candidate, Candidate, float, float | None], bool]


def conditional(
    demand: Demand, prefill: Candidate, decode: Candidate, here: Candidate, late_s: float, tpot_s: float | None
) -> bool:
    """Whether the prompt is better computed on `decode`. `here`: that worker, with the prompts that it computes and the
    law of their chunks, which is that of `prefill` while it has computed too few. Without laws: no."""
    law = here.law or prefill.law
    if prefill.law is None or decode.law is None or law is None:
        return False
    batch_s = predict_tpot_s(demand, decode)
    if tpot_s is not None and batch_s + _chunk_s(law, demand, here) > tpot_s:
        return False
    return _here_s(demand, decode, here, law, batch_s) < _away_s(demand, prefill, prefill.law) + late_s


def _away_s(demand: Demand, prefill: Candidate, law: StepTime) -> float:
    fresh = max(1, demand.tokens - prefill.cached)
    others = sum(min(1.0, work.tokens / fresh) for work in prefill.works)
    return predict_ttft_s(demand, prefill) + 2 * others * _own_s(law, demand, prefill)


def _here_s(demand: Demand, decode: Candidate, here: Candidate, law: StepTime, batch_s: float) -> float:
    """The batch's own step runs in any case. `decode.works` has the prompts that wait here, too: sequences to come."""
    fresh, own_s = max(1, demand.tokens - here.cached), _own_s(law, demand, here)
    tokens, before_s = float(fresh), 0.0
    for work in here.works:
        part = min(1.0, fresh / work.tokens) if work.tokens else 0.0
        tokens += part * work.tokens
        before_s += part * (law.b * work.tokens + law.c * work.squares)
    steps = math.ceil(tokens / here.step_tokens)
    streams = sum(work.sequences for work in decode.works)
    return steps * batch_s + before_s + own_s + streams * own_s


def _own_s(law: StepTime, demand: Demand, at: Candidate) -> float:
    """Of computing the leg's new tokens, without the constant part of a step."""
    return law.b * (demand.tokens - at.cached) + law.c * (demand.tokens**2 - at.cached**2)


def _chunk_s(law: StepTime, demand: Demand, here: Candidate) -> float:
    """Of the leg's last and longest chunk."""
    start = max(here.cached, demand.tokens - here.step_tokens)
    return law.b * (demand.tokens - start) + law.c * (demand.tokens**2 - start**2)


ALWAYS, NEVER = "always", "never"
POLICIES: dict[str, OnDecode] = {
    ALWAYS: lambda *_: False,
    NEVER: lambda *_: True,
    "conditional": conditional,
}
