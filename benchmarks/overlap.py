"""How much of the KV hand-over hides behind prefill: the real cluster, its two workers on a core each.

    .venv/bin/python benchmarks/overlap.py [--config configs/local.yaml] [--tokens 1024 4096] [--repeats 7] [--json]

Prompts of random ids are served twice in turns: alone (`max_tokens` 1: no decode worker takes part, transfer off) and
with their answer decoded on the other core. For each length, medians:

- hidden   1 - (commit - end of prefill compute) / time of the same transfer alone. Each moment is taken where it
           occurs: the workers share a clock. The transfer alone moves the same KV between two pinned processes
           (benchmarks/kv_transfer.py).
- gap      token 1 to token 2, in decode steps (a step: the median gap of the later tokens): as drawn at the workers,
           and as the router saw it
- exposed  the transfer's part after the end of prefill compute, until its last acknowledgement came back
- prefill  compute with the transfer on, against off
- TTFT     with the transfer on, against prefill alone
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from baton.benchmarks.kv_transfer import alone_s
from baton.client.api import Client
from baton.client.completion import Completion
from baton.cluster import config_load
from baton.cluster.config import Config
from baton.cluster.deployment import running
from baton.cluster.driver import run
from baton.proto import baton_pb2 as api

_OUTPUT = 12
_SETTINGS = (
    "cluster.launcher=process",
    "engine.prefix_cache=false",
    "pools.prefill.cores=0",
    "pools.decode.cores=1",
    "router.grpc=127.0.0.1:0",
    "router.http=127.0.0.1:0",
    "router.admin=127.0.0.1:0",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one prompt length; seconds."""

    tokens: int
    kv_bytes: int
    frames: int
    alone_s: float
    commit_s: float
    exposed_s: float
    hidden: float
    gap_steps: float
    router_gap_steps: float
    prefill_ratio: float
    ttft_ratio: float
    prefill_s: float
    step_s: float


async def measure(client: Client, tokens: int, repeats: int, transfer_s: float) -> Row:
    """One length: with and without transfer in turns, after one of each that does not count."""
    rng = random.Random(tokens)
    off: list[Completion] = []
    on: list[Completion] = []
    for _ in range(repeats + 1):
        for kind, output in ((off, 1), (on, _OUTPUT)):
            ids = api.TokenIds(ids=[rng.randrange(1000, 40000) for _ in range(tokens)])
            request = api.GenerateRequest(token_ids=ids, max_tokens=output, ignore_eos=True, temperature=0)
            kind.append(await client.complete(request))
    return summary(tokens, [timing(one) for one in off[1:]], on[1:], transfer_s)


def summary(tokens: int, off: Sequence[api.Timing], on: Sequence[Completion], transfer_s: float) -> Row:
    """The medians."""
    timings = [timing(one) for one in on]
    later = [after - before for one in on for (before, _), (after, _) in pairwise(one.arrivals[1:])]
    step_s = statistics.median(later)
    commit_s = statistics.median(one.commit_s for one in timings)
    pairs = list(zip(timings, off, strict=True))
    return Row(
        tokens=tokens,
        kv_bytes=timings[0].kv_bytes,
        frames=timings[0].kv_frames,
        alone_s=transfer_s,
        commit_s=commit_s,
        exposed_s=statistics.median(one.transfer_exposed_s for one in timings),
        hidden=1 - commit_s / transfer_s,
        gap_steps=statistics.median(one.worker_gap_s for one in timings) / step_s,
        router_gap_steps=statistics.median(one.first_gap_s for one in timings) / step_s,
        prefill_ratio=statistics.median(one.prefill_s / other.prefill_s for one, other in pairs),
        ttft_ratio=statistics.median(one.ttft_s / other.ttft_s for one, other in pairs),
        prefill_s=statistics.median(one.prefill_s for one in off),
        step_s=step_s,
    )


def timing(completion: Completion) -> api.Timing:
    """What the router reported of a request that ended well."""
    if completion.timing is None:
        raise RuntimeError(f"request {completion.request_id} came back without its timing")
    return completion.timing


def show(row: Row) -> str:
    """One line."""
    return (
        f"{row.tokens:6d} tokens: {row.kv_bytes / 1e6:6.1f} MB in {row.frames:3d} frames, "
        f"alone {1e3 * row.alone_s:6.1f} ms; "
        f"commit {1e3 * row.commit_s:5.2f} ms after prefill: {row.hidden:5.1%} hidden; "
        f"exposed {1e3 * row.exposed_s:5.2f} ms; "
        f"token 1 to 2: {row.gap_steps:4.2f} steps of {1e3 * row.step_s:.1f} ms, {row.router_gap_steps:4.2f} at the "
        f"router; "
        f"prefill {row.prefill_ratio - 1:+.1%}, TTFT {row.ttft_ratio - 1:+.1%}"
    )


async def main(config: Config, arguments: argparse.Namespace) -> int:
    """Start the cluster, measure each length, print."""
    alone = {tokens: alone_s(config, tokens, arguments.repeats) for tokens in arguments.tokens}
    rows = []
    async with (
        running(config, "overlap", lambda *_: None) as deployment,
        Client(deployment.endpoints["grpc"]) as client,
    ):
        for tokens in arguments.tokens:
            rows.append(await measure(client, tokens, arguments.repeats, alone[tokens]))
            if not arguments.json:
                print(show(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="configs/local.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the YAML")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    raise SystemExit(run(main(config_load.load(options.config, [*_SETTINGS, *options.set]), options)))
