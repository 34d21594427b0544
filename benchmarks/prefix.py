"""What the prefix cache saves: TTFT of prompts that share a long system prompt, through the real service.

    .venv/bin/python benchmarks/prefix.py [--config configs/local.yaml] [--tokens 2000] [--repeats 15] [--json]

Every request is the same system prompt with a question of its own. In turns it comes as one of many (it finds the
system prompt's KV in both pools) and under a cache salt that nobody else has, so that nothing is found: as without the
cache, in the same seconds and on the same cluster. Medians over the repeats; TTFT as the client sees it, over gRPC.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import asdict, dataclass

from baton.benchmarks.overlap import timing
from baton.client.api import Client
from baton.client.completion import Completion
from baton.cluster import config_load
from baton.cluster.config import Config
from baton.cluster.deployment import running
from baton.cluster.driver import run
from baton.proto import baton_pb2 as api

_QUESTION, _OUTPUT = 24, 8  # tokens
_SETTINGS = (
    "cluster.launcher=process",
    "pools.prefill.cores=0",
    "pools.decode.cores=1",
    "router.grpc=127.0.0.1:0",
    "router.http=127.0.0.1:0",
    "router.admin=127.0.0.1:0",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one kind of request; seconds, tokens, bytes."""

    kind: str
    ttft_s: float
    longest_ttft_s: float
    prefill_s: float
    first_gap_s: float
    cached_tokens: int
    kv_bytes: int


async def measure(client: Client, tokens: int, repeats: int) -> list[Row]:
    """Both kinds in turns, after one of each that does not count (the first puts the prefix into the cache)."""
    rng = random.Random(tokens)
    system = rng.choices(range(1000, 40000), k=tokens)
    kinds: dict[str, list[Completion]] = {"without": [], "with": []}
    for turn in range(repeats + 1):
        for kind, done in kinds.items():
            question = rng.choices(range(1000, 40000), k=_QUESTION)
            salt = f"{turn}" if kind == "without" else ""
            request = api.GenerateRequest(
                token_ids=api.TokenIds(ids=system + question),
                max_tokens=_OUTPUT,
                ignore_eos=True,
                temperature=0,
                cache_salt=salt,
            )
            done.append(await client.complete(request))
    return [summary(kind, done[1:]) for kind, done in kinds.items()]


def summary(kind: str, done: list[Completion]) -> Row:
    """The medians."""
    timings = [timing(one) for one in done]
    ttft = [one.arrivals[0][0] - one.started_s for one in done]
    return Row(
        kind=kind,
        ttft_s=statistics.median(ttft),
        longest_ttft_s=max(ttft),
        prefill_s=statistics.median(one.prefill_s for one in timings),
        first_gap_s=statistics.median(one.first_gap_s for one in timings),
        cached_tokens=int(statistics.median(one.usage.cached_tokens if one.usage else 0 for one in done)),
        kv_bytes=int(statistics.median(one.kv_bytes for one in timings)),
    )


def show(row: Row) -> str:
    """One line."""
    return (
        f"{row.kind:>7}: TTFT {1e3 * row.ttft_s:7.1f} ms (longest {1e3 * row.longest_ttft_s:7.1f}), "
        f"prefill {1e3 * row.prefill_s:7.1f} ms, token 1 to 2 {1e3 * row.first_gap_s:5.1f} ms; "
        f"{row.cached_tokens} prompt tokens cached, {row.kv_bytes / 1e6:.1f} MB of KV sent"
    )


async def main(config: Config, arguments: argparse.Namespace) -> int:
    """Start the cluster, measure, print."""
    async with (
        running(config, "prefix", lambda *_: None) as deployment,
        Client(deployment.endpoints["grpc"]) as client,
    ):
        rows = await measure(client, arguments.tokens, arguments.repeats)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print("\n".join(map(show, rows)))
        print(f"TTFT with the cache is {rows[1].ttft_s / rows[0].ttft_s:.1%} of that without")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="configs/local.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the YAML")
    parser.add_argument("--tokens", type=int, default=2000, help="of the system prompt")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    raise SystemExit(run(main(config_load.load(options.config, [*_SETTINGS, *options.set]), options)))
