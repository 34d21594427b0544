"""Requests that measure a running cluster: prompts of new contents, and batches of them."""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass

from ...client.api import Client
from ...client.completion import Completion
from ...proto import baton_pb2 as api
from ...proto.errors import InternalError
from ...proto.step_time import Features

_IDS = range(32, 256)
_LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the grid keeps to. `longest`: tokens of a prompt and its answer."""

    longest: int
    max_sequences: int
    max_batch_tokens: int  # prompt tokens of a step, wherever they are computed
    rounds: int = 2
    steps: int = 40  # of each batch
    together: bool = True  # also measure prompts and batches at the same time


class Rig:
    """`client` leads to a cluster that does nothing else."""

    def __init__(self, client: Client, limits: Limits, rng: random.Random) -> None:
        self.client, self.limits, self._rng = client, limits, rng

    async def prompt(self, tokens: int, output: int) -> Completion:
        """One request of new contents."""
        ids = api.TokenIds(ids=self._rng.choices(_IDS, k=tokens))
        request = api.GenerateRequest(token_ids=ids, max_tokens=output, ignore_eos=True, temperature=0)
        done = await self.client.complete(request)
        if done.timing is None or not done.arrivals:
            raise InternalError(f"a request of {tokens} tokens ended without tokens or timing")
        return done

    def lengths(self, room: int) -> list[int]:
        """Those of the grid that leave so many tokens for the answer."""
        return [length for length in _LENGTHS if length + room <= self.limits.longest]

    def features(self, tokens: int) -> Features:
        """Of all steps of a prompt alone."""
        return float(-(-tokens // self.limits.max_batch_tokens)), float(tokens), float(tokens**2)

    async def batch(self, batch: int, context: int, before: float) -> tuple[Features, float] | None:
        """Features and seconds of a step while all of a batch ran: from the last first token to the first end, which is
        at least `before` steps behind the first one's beginning. None: it cannot be seen."""
        answers = self.limits.steps + round(before)
        if context + answers > self.limits.longest:
            return None
        dones = await asyncio.gather(*(self.prompt(context, answers) for _ in range(batch)))
        begin = max(done.arrivals[0][0] for done in dones)
        end = min(done.arrivals[-1][0] for done in dones)
        moments = [[when for when, _ in done.arrivals if begin <= when <= end] for done in dones]
        counts = [sum(n for when, n in done.arrivals if begin < when <= end) for done in dones]
        if end <= begin or min(len(inside) for inside in moments) < 5:
            return None
        steps = statistics.mean(counts)
        said = statistics.mean(sum(n for when, n in done.arrivals if when <= begin) for done in dones) + steps / 2
        return (1.0, float(batch), batch * (context + said)), (end - begin) / steps


def first_s(done: Completion) -> float:
    """TTFT."""
    return done.arrivals[0][0] - done.started_s


def timing_of(done: Completion) -> api.Timing:
    """What the cluster says of the request."""
    return done.timing or api.Timing()
