"""`baton bench`: the configuration's workload as a closed loop or as Poisson arrivals, against the public gRPC API."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from ..client.api import Client
from ..client.completion import Completion
from ..client.retry import Retry
from ..proto import baton_pb2 as api
from ..proto.errors import BatonError
from .access import NOBODY, Access
from .bench_plan import Plan
from .bench_stats import Sample, summarise
from .config import Config
from .config_workload import SLOSection, WorkloadSection
from .deployment import running
from .model_check import ModelFacts
from .output import results, say
from .progress import StartProgress
from .simulate import slo_limits
from .simulator.request import Arrival
from .simulator.synthetic import length

_IDS = range(32, 256)  # synthetic prompts: every vocabulary has these, and they are nobody's end of sequence
_COUNTED_S = 0.5


def make_requests(workload: WorkloadSection, count: int, seed: int, context: int) -> list[api.GenerateRequest]:
    """Random prompts and fixed output lengths, cut so that both fit the model's context."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        output = min(length(workload.output_tokens, rng), context - 1)
        prompt = min(length(workload.prompt_tokens, rng), context - output)
        ids = api.TokenIds(ids=rng.choices(_IDS, k=prompt))
        requests.append(api.GenerateRequest(token_ids=ids, max_tokens=output, ignore_eos=True, temperature=0))
    return requests


def replayed_requests(recorded: Sequence[Arrival], seed: int, context: int) -> list[api.GenerateRequest]:
    """As long as recorded, cut to fit the model's context; prompts share beginnings where the trace says so."""
    rng = random.Random(seed)
    requests = []
    for arrival in recorded:
        output = min(arrival.output, context - 1)
        prompt = min(arrival.prompt, context - output)
        if arrival.contents is None:
            ids = rng.choices(_IDS, k=prompt)
        else:
            ids = [_IDS[(40503 * value + 7919 * place) % len(_IDS)] for place, value in enumerate(arrival.contents)]
        request = api.GenerateRequest(max_tokens=output, ignore_eos=True, temperature=0)
        request.token_ids.ids.extend(ids[:prompt])
        requests.append(request)
    return requests


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """When each request of an open loop is to be sent, in seconds from the start: a Poisson process."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


async def _one(client: Client, request: api.GenerateRequest, sent_s: float, warm_up: bool) -> Sample:
    done = Completion(time.monotonic(), [])
    error = ""
    try:
        async for message in client.stream(request):
            done.take(message, time.monotonic())
    except BatonError as failed:
        error = failed.code
    timing = done.timing
    return Sample(
        sent_s,
        time.monotonic(),
        tuple(done.arrivals),
        len(request.token_ids.ids),
        error,
        warm_up,
        request.max_tokens,
        timing.commit_s if timing is not None and timing.decode_worker else None,
    )


async def run_load(client: Client, workload: WorkloadSection, plan: Plan) -> list[Sample]:
    """Send everything and wait for all answers. Raises BatonError when the service does not answer at all."""
    models = await client.models()
    context = models[0].max_model_len
    if plan.recorded is not None:
        requests = replayed_requests(plan.recorded, plan.seed, context)
    else:
        requests = make_requests(workload, plan.warm_up + plan.requests, plan.seed, context)
    count = len(requests)
    samples: list[Sample] = []
    counter = asyncio.create_task(_count(samples, count))
    try:
        if plan.recorded is not None:
            await _open_loop(client, requests, plan, [arrival.at for arrival in plan.recorded], samples)
        elif plan.rate is not None:
            await _open_loop(client, requests, plan, arrivals(plan.rate, count, plan.seed), samples)
        else:
            await _closed_loop(client, requests, plan, samples)
    finally:
        counter.cancel()
    return samples


async def _open_loop(
    client: Client, requests: Sequence[api.GenerateRequest], plan: Plan, times: Sequence[float], samples: list[Sample]
) -> None:
    start = time.monotonic()

    async def one(number: int, at: float) -> None:
        await asyncio.sleep(start + at - time.monotonic())
        samples.append(await _one(client, requests[number], start + at, number < plan.warm_up))

    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(times):
            group.create_task(one(number, at))


async def _closed_loop(
    client: Client, requests: Sequence[api.GenerateRequest], plan: Plan, samples: list[Sample]
) -> None:
    numbers = iter(range(len(requests)))

    async def user() -> None:
        for number in numbers:
            now = time.monotonic()
            samples.append(await _one(client, requests[number], now, number < plan.warm_up))

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency or 1):
            group.create_task(user())


async def _count(samples: list[Sample], total: int) -> None:
    """A line on a terminal's stderr that counts."""
    while sys.stderr.isatty():
        print(f"\r{len(samples)} of {total} requests", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(_COUNTED_S)


async def with_cluster(
    config: Config, facts: ModelFacts, workload: WorkloadSection, plan: Plan, as_json: bool, access: Access = NOBODY
) -> int:
    """Start a cluster for the benchmark."""
    progress = StartProgress(verbose=False)
    with progress:
        async with running(config, facts.name, progress.report) as deployment:
            progress.stop()
            return await with_address(deployment.endpoints["grpc"], config.slo, workload, plan, as_json, access)


async def with_address(
    address: str, slo: SLOSection, workload: WorkloadSection, plan: Plan, as_json: bool, access: Access = NOBODY
) -> int:
    """Load a running router. Returns 1 when no measured request was answered."""
    async with access.client(address, Retry(attempts=1)) as client:
        samples = await run_load(client, workload, plan)
    result = {"load": load_fields(plan, workload), **summarise(samples, slo_limits(slo))}
    if as_json:
        say(json.dumps(result))
    else:
        with results() as file:
            print_table(result, file)
    return 0 if result["requests"]["completed"] else 1


def _words(plan: Plan) -> str:
    if plan.recorded is not None:
        return f"{len(plan.recorded)} recorded requests"
    return f"{plan.concurrency} at a time" if plan.rate is None else f"poisson {plan.rate:g}/s"


def load_fields(plan: Plan, workload: WorkloadSection) -> dict[str, Any]:
    return {
        "mode": "closed loop" if plan.rate is None and plan.recorded is None else "open loop",
        "workload": _words(plan),
        "rate_per_s": plan.rate,
        "concurrency": plan.concurrency,
        "seed": plan.seed,
        "prompt_tokens": workload.prompt_tokens.model_dump(),
        "output_tokens": workload.output_tokens.model_dump(),
    }


def print_table(result: dict[str, Any], file: TextIO) -> None:
    """For people."""
    console = Console(file=file, highlight=False)
    requests, load, rates = result["requests"], result["load"], result["throughput"]
    shape = f"{load['concurrency']} at a time" if load["rate_per_s"] is None else f"{load['rate_per_s']:g}/s"
    console.print(
        f"{load['mode']}, {shape}: {requests['completed']} completed, {requests['failed']} failed "
        f"{requests['errors'] or ''}after {requests['warm_up']} for warm-up"
    )
    table = Table()
    for heading in ("", "count", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        values = result[name]
        numbers = [values[key] for key in ("mean", "p50", "p90", "p99")]
        cells = ["-" if number is None else f"{1000 * number:.1f} ms" for number in numbers]
        table.add_row(name.removesuffix("_s").upper(), str(values["count"]), *cells)
    console.print(table)
    if rates["requests_per_s"] is not None:
        console.print(
            f"{rates['output_tokens_per_s']:.1f} output tokens/s, {rates['requests_per_s']:.2f} requests/s "
            f"in a steady window of {result['window_s']:.1f} s"
        )
    if result["slo"] is not None:
        held = ", ".join(f"{name} {_word(kept)}" for name, kept in result["slo"]["held"].items())
        console.print(f"limits: {held}")


def _word(kept: bool | None) -> str:
    return "undefined" if kept is None else "held" if kept else "missed"
