"""Conditional disaggregation: whether a leg's prompt is better computed on the decode worker that will decode it.

By the laws of both workers' steps. Away, the leg waits at P, is computed there and its KV travels. Here, its new tokens
run in chunks beside the batch: each step lasts as long as the batch's own step and the chunk together, so the chunk is
what the TPOT objective leaves room for, and a busy batch leaves none. It is worth it when the uncached part is short,
or P is busy.
"""

from __future__ import annotations

import math

from ...proto.step_time import StepTime
from .latency_aware import predict_tpot_s, predict_ttft_s
from .policy import Candidate, Demand


def local_ttft_s(demand: Demand, decode: Candidate, prefill_law: StepTime, tpot_s: float) -> float:
    """TTFT of a leg that is prefilled on its decode worker, whose steps may last `tpot_s`; infinite: never.

    `prefill_law`: of prefill on that worker; its constant part is that of the decode step, which runs in any case.
    """
    batch_s = predict_tpot_s(demand, decode)
    fresh, squares = demand.tokens - decode.cached, demand.tokens**2 - decode.cached**2
    own_s = prefill_law.b * fresh + prefill_law.c * squares
    if own_s <= 0:
        return batch_s
    room_s = tpot_s - batch_s
    return math.ceil(own_s / room_s) * batch_s + own_s if room_s > 0 else math.inf


def prefill_on_decode(
    demand: Demand, prefill: Candidate, decode: Candidate, prefill_law: StepTime, tpot_s: float, transfer_s: float
) -> bool:
    """Whether the first token comes sooner that way, every token of the batch still within `tpot_s`.

    `transfer_s`: of the KV that the decode worker lacks, as far as prefill does not hide it. Without laws: no.
    """
    if prefill.law is None or decode.law is None:
        return False
    return local_ttft_s(demand, decode, prefill_law, tpot_s) < predict_ttft_s(demand, prefill) + transfer_s
