"""Is the planner's choice the best there is? Six workloads, each plan of the space simulated, the cheapest that holds.

    .venv/bin/python benchmarks/plan_search.py [--most 4] [--requests 2000] [--only NAME ...] [--json]

For each workload three answers over the same space (aggregated or not, every degree, up to `--most` workers a pool):
the closed form's (`baton plan`), its shortlist decided by simulation (`cluster/simulator/confirm.py`), and the cheapest
of all that are simulated, whatever a closed form says. Cost is GPUs. Exit code 1: a decision costs more than 1.05 of
the cheapest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.cluster import config_load
from baton.cluster.planner.plans import Plan
from baton.cluster.planner.search import Search
from baton.cluster.planner.setup import site
from baton.cluster.planner.workload import from_config, slo_of
from baton.cluster.simulator.confirm import Verdict, arrivals_of, decide, exhaust

CONFIG = Path(__file__).parent.parent / "configs" / "h100-node.yaml"
_LENGTHS = "workload.prompt_tokens={{mean: {}, cv: {}}}", "workload.output_tokens={{mean: {}, cv: {}}}"
_LIMITS = "slo={{ttft: {{p99: {}}}, tpot: {{p99: {}}}}}"


def settings(
    model: str, rate: str, prompt: tuple[int, float], output: tuple[int, float], ttft: str, tpot: str
) -> list[str]:
    """Of the configuration."""
    lengths = [text.format(*of) for text, of in zip(_LENGTHS, (prompt, output), strict=True)]
    return [f"model.path={model}", f"workload.rate={rate}", *lengths, _LIMITS.format(ttft, tpot)]


WORKLOADS = {
    "chat": settings("llama-3.1-8b", "30/s", (1000, 0.9), (220, 0.8), "500ms", "15ms"),
    "summaries": settings("llama-3.1-8b", "12/s", (4000, 0.5), (150, 0.5), "1500ms", "15ms"),
    "code": settings("llama-3.1-8b", "40/s", (2048, 0.8), (28, 1.0), "600ms", "20ms"),
    "reasoning": settings("llama-3.1-8b", "4/s", (500, 0.5), (2000, 0.6), "1s", "12ms"),
    "large model": settings("llama-3.1-70b", "6/s", (1000, 0.9), (220, 0.8), "2s", "40ms"),
    "idle": settings("llama-3.1-8b", "1/s", (600, 0.5), (200, 0.5), "500ms", "15ms"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A workload. GPUs of each answer; 0: there is none."""

    workload: str
    closed_form: str
    closed_form_gpus: int
    closed_form_holds: bool
    decided: str
    decided_gpus: int
    best: str
    best_gpus: int
    ratio: float | None
    plans: int
    simulated: int
    closed_form_s: float
    decided_s: float
    exhaustive_s: float


def words(plan: Plan | None) -> str:
    """Its shape."""
    if plan is None:
        return "none"
    if plan.kind == "aggregated":
        return f"{plan.replicas[1]} x TP{plan.decode.tp} aggregated"
    return f"{plan.replicas[0]}P x TP{plan.prefill.tp} + {plan.replicas[1]}D x TP{plan.decode.tp}"


def measure(name: str, most: int, requests: int) -> Row:
    """One workload, three answers."""
    config = config_load.load(str(CONFIG), WORKLOADS[name])
    search = Search(site(config), 8 * most, (1, 2, 4, 8))
    workload, slo = from_config(config), slo_of(config)
    began = time.thread_time()
    found = search.run(workload, slo).best
    closed = time.thread_time()
    space = [plan for kind in ("disaggregated", "aggregated") for plan in search.all_plans(kind, workload, slo, most)]
    arrivals = arrivals_of(workload, requests=requests)
    decided, simulated = decide(space, slo, arrivals)
    chosen = time.thread_time()
    best, _ = exhaust(space, slo, arrivals)
    ended = time.thread_time()
    holds = found is not None and decide([found], slo, arrivals)[0] is not None
    return Row(
        name,
        words(found),
        found.gpus if found is not None else 0,
        holds,
        words(_plan(decided)),
        decided.plan.gpus if decided is not None else 0,
        words(_plan(best)),
        best.plan.gpus if best is not None else 0,
        decided.plan.gpus / best.plan.gpus if decided is not None and best is not None else None,
        len(space),
        simulated,
        closed - began,
        chosen - closed,
        ended - chosen,
    )


def _plan(verdict: Verdict | None) -> Plan | None:
    return verdict.plan if verdict is not None else None


def show(row: Row) -> str:
    """A few lines."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    holds = "holds in the simulator" if row.closed_form_holds else "does not hold in the simulator"
    lines = [
        f"{row.workload}:",
        f"  closed form {row.closed_form}, {row.closed_form_gpus} GPUs, {holds} ({row.closed_form_s:.1f} s)",
        f"  decided     {row.decided}, {row.decided_gpus} GPUs, {row.simulated} simulated ({row.decided_s:.1f} s)",
        f"  cheapest    {row.best}, {row.best_gpus} GPUs, of {row.plans} ({row.exhaustive_s:.1f} s); ratio {ratio}",
    ]
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    """Every workload, as it comes."""
    worst = 0.0
    for name in options.only or WORKLOADS:
        row = measure(name, options.most, options.requests)
        print(json.dumps(asdict(row)) if options.json else show(row), flush=True)
        worst = max(worst, row.ratio if row.ratio is not None else float(row.best_gpus != row.decided_gpus) * 9)
    return 0 if worst <= 1.05 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int, default=4, help="workers of a pool")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--json", action="store_true")
    sys.exit(main(parser.parse_args()))
