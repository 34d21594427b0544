"""What one change would bring: the highest rate that the same plan serves within its limits, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .costs import CostModel
from .plans import Plan
from .search import Search
from .setup import Site

_HITS = 0.5
_GUESSES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Requests a second with it, and that many times the plan's own."""

    what: str
    rate: float
    times: float | None  # None: the plan itself serves nothing within its limits


def changes(search: Search, site: Site, plan: Plan) -> list[Change]:
    """Each by itself, on the plan as it is."""
    now = search.capacity(plan)
    found = []
    for what, changed in _variants(site, plan):
        rate = search.capacity(changed)
        found.append(Change(what, rate, rate / now if now > 0 else None))
    return found


def _variants(site: Site, plan: Plan) -> Iterator[tuple[str, Plan]]:
    first, second = plan.replicas
    if plan.kind == "disaggregated":
        yield f"one more prefill worker (+{plan.prefill.tp} ranks)", replace(plan, replicas=(first + 1, second))
        yield f"one more decode worker (+{plan.decode.tp} ranks)", replace(plan, replicas=(first, second + 1))
        link = plan.prefill.options.link or float(site.hardware.network)
        yield "a network twice as fast", _both(plan, link=2 * link)
    else:
        yield f"one more worker (+{plan.decode.tp} ranks)", replace(plan, replicas=(first, second + 1))
    if plan.decode.options.kv in ("bfloat16", "float16", "float32"):
        yield "KV in fp8 (kv.dtype: fp8)", _both(plan, kv="fp8")
    if plan.decode.options.weights in ("bfloat16", "float32"):
        yield "weights in int8", _both(plan, weights="int8")
    hits = max(_HITS, plan.workload.prefix_share)
    if hits > plan.workload.prefix_share:
        shared = replace(plan.workload, prefix_share=hits)
        yield f"a prefix cache with {hits:.0%} of prompt tokens", replace(plan, workload=shared)
    if not plan.decode.options.spec_tokens:
        accepted = site.config.plan.speculation.accepted
        guessing = plan.decode.with_options(spec_tokens=_GUESSES)
        yield f"speculation of {_GUESSES} tokens, {accepted:.0%} accepted", replace(plan, decode=guessing)


def _both(plan: Plan, **options: object) -> Plan:
    def changed(cost: CostModel) -> CostModel:
        return cost.with_options(**options)

    return replace(plan, prefill=changed(plan.prefill), decode=changed(plan.decode))
