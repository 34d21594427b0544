"""What a pool of workers does under a workload: latencies by percentile, batches, memory, and what binds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from .costs import CostModel
from .queueing import SHARES, Queue, Sharing, normal_within, quantile
from .workload import Workload

METHOD_TTFT = "M/G/c, Kimura's approximation, at the busiest five minutes"
METHOD_TPOT = "processor sharing in closed form, at the busiest five minutes"
_RARE = 0.99  # a batch limit that is reached more often than in 1 - this is a queue of its own


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds. `within(limit)` is the share of requests that take at most so long."""

    mean: float
    percentiles: dict[float, float]
    method: str


@dataclass(frozen=True)
class Prefill:
    """A pool that computes prompts."""

    cost: CostModel
    workload: Workload
    replicas: int

    def _alone(self) -> list[float]:
        terms = self.cost.prompts(self.workload.prompt.points, self.workload.prefix_share)
        return [prompt.total for prompt in terms]

    @cached_property
    def queue(self) -> Queue:
        """Its prompts, one after the other on each worker."""
        return Queue(self.replicas, self.workload.busiest, self._alone(), full_step_s(self.cost, self.workload))

    def ttft(self) -> Latency:
        """Wait and computing; the first token leaves before the KV has arrived."""
        queue = self.queue
        mean = queue.mean_wait() + queue.service
        return Latency(mean, {share: queue.percentile(share) for share in SHARES}, METHOD_TTFT)

    def ttft_within(self, limit: float) -> float:
        """See Latency."""
        return self.queue.within(limit)

    @cached_property
    def bottleneck(self) -> str:
        """Of a mean prompt."""
        n, cached = self.workload.prompt.mean, self.workload.prefix_share
        return self.cost.prefill_terms(max(1.0, n * (1 - cached)), n * cached).bottleneck


@dataclass(frozen=True)
class Decode:
    """A pool that generates. `exposed`: seconds between the first token and its KV's arrival, mean over requests."""

    cost: CostModel
    workload: Workload
    replicas: int
    exposed: float = 0.0
    prefilling: float = 0.0  # of each worker's time, that computing prompts takes (in an aggregated engine)
    prompt_square: float = 0.0  # mean square of a prompt's seconds, likewise

    @cached_property
    def context(self) -> float:
        """Mean tokens of a running sequence: long answers are there for longer, so E[o^2] / (2 E[o]) of output."""
        output = self.workload.output
        return self.workload.prompt.mean + output.square / (2 * output.mean)

    @cached_property
    def sharing(self) -> Sharing:
        """One worker's steps; prompts that are computed in between stretch them by 1 / (1 - their share)."""
        law, free = self.cost.token_law, max(1e-9, 1 - self.prefilling)
        decoded = max(1e-9, self.workload.output.mean - 1)  # the first token is prefill's
        slope = (law.b + law.c * self.context) / free
        return Sharing(law.a / free, slope, self.workload.busiest / self.replicas, decoded)

    @cached_property
    def most_sequences(self) -> float:
        """That the KV pool holds: its tokens / those of a running sequence, in whole blocks on average half full."""
        size = self.cost.options.block_size
        return self.cost.kv_blocks * size / (self.context + size / 2)

    @cached_property
    def staged(self) -> float:
        """Sequences whose blocks are held while their KV is on its way (Little's law)."""
        return self.workload.busiest / self.replicas * self.exposed

    @cached_property
    def batch_limit(self) -> float:
        """Sequences: the engine's and the memory's."""
        return min(float(self.cost.options.max_sequences), self.most_sequences - self.staged)

    @cached_property
    def binding(self) -> str | None:
        """What stops the batch, if its 99th percentile does not fit."""
        if self.cost.kv_blocks * self.cost.options.block_size < self.workload.prompt.most + self.workload.output.most:
            return "KV memory: the longest request does not fit"
        sharing = self.sharing
        if self.prefilling >= 1 or sharing.utilisation >= 1:
            return "decode throughput"
        if sharing.batch_at(_RARE) <= self.batch_limit:
            return None
        if self.most_sequences - self.staged >= self.cost.options.max_sequences:
            return "max_sequences"
        return "KV memory" if self.staged < 0.1 * self.most_sequences else "staging of KV"

    @cached_property
    def _spreads(self) -> list[float]:
        return [self._spread(point - 1) for point in self.workload.output.points if point > 1]

    def _spread(self, tokens: float) -> float:
        """Standard deviation of a request's seconds per token: of the batch, and of the prompts that fell into it.

        In the time D that the answer takes prompts come as a compound Poisson process: variance rate * E[S^2] * D.
        """
        sharing = self.sharing
        batch = sharing.k * sharing.deviation
        if not self.prefilling:
            return batch
        lasts = tokens * sharing.step
        return math.hypot(batch, math.sqrt(sharing.rate * self.prompt_square * lasts) / tokens)

    def tpot_within(self, limit: float) -> float:
        """Share of requests: over the output lengths, a normal for each."""
        if self.binding == "decode throughput":
            return 0.0
        points = [point - 1 for point in self.workload.output.points if point > 1]
        if not points:
            return 1.0  # one token: there is no time per output token
        step = self.sharing.step
        spreads = zip(points, self._spreads, strict=True)
        return sum(normal_within(limit, step + self.exposed / n, spread) for n, spread in spreads) / len(points)

    def tpot(self) -> Latency:
        """Per request: (end - first token) / (output tokens - 1)."""
        if self.binding == "decode throughput":
            return Latency(math.inf, dict.fromkeys(SHARES, math.inf), METHOD_TPOT)
        points = [point - 1 for point in self.workload.output.points if point > 1]
        step = self.sharing.step
        gap = sum(self.exposed / tokens for tokens in points) / len(points) if points else 0.0
        most = step + self.exposed + 10 * self._spread(points[0] if points else 1.0)
        found = {share: quantile(share, self.tpot_within, most) for share in SHARES}
        return Latency(step + gap, found, METHOD_TPOT)

    @cached_property
    def bottleneck(self) -> str:
        """Of a step of the mean batch."""
        batch = max(1.0, min(self.sharing.batch, self.batch_limit))
        return self.cost.decode_terms(batch, batch * self.context).bottleneck


@dataclass(frozen=True)
class Aggregated:
    """Workers that do both: chunks of prompts share the steps of the running batch (Sarathi-Serve 2024)."""

    cost: CostModel
    workload: Workload
    replicas: int

    @cached_property
    def _computed(self) -> list[float]:
        """Seconds that each prompt adds to the steps it is in."""
        terms = self.cost.prompts(self.workload.prompt.points, self.workload.prefix_share)
        return [prompt.total - prompt.overhead - prompt.weights for prompt in terms]

    @cached_property
    def decode(self) -> Decode:
        """The batch, between chunks."""
        seconds = self._computed
        rate = self.workload.busiest / self.replicas
        mean, square = sum(seconds) / len(seconds), sum(s * s for s in seconds) / len(seconds)
        return Decode(self.cost, self.workload, self.replicas, 0.0, rate * mean, square)

    @cached_property
    def _queue(self) -> tuple[Queue, list[float]]:
        """Prompts in line, and what each takes from its turn on: whole steps, and half of one that had begun."""
        decode, chunk = self.decode, self.cost.options.max_batch_tokens
        law = self.cost.token_law
        batch = min(decode.sharing.batch, decode.batch_limit)
        step = law.a + (law.b + law.c * decode.context) * max(1.0, batch)
        services, latencies = [], []
        for n, computed in zip(self.workload.prompt.points, self._computed, strict=True):
            new = max(1.0, n * (1 - self.workload.prefix_share))
            services.append(computed + new / chunk * step)
            latencies.append(computed + (math.ceil(new / chunk) + 0.5 * (decode.sharing.utilisation > 0)) * step)
        return Queue(self.replicas, self.workload.busiest, services), latencies

    @cached_property
    def queue(self) -> Queue:
        """Its prompts."""
        return self._queue[0]

    def ttft(self) -> Latency:
        """Wait, and the steps that the prompt is part of."""
        if self.decode.binding == "decode throughput":
            return Latency(math.inf, dict.fromkeys(SHARES, math.inf), METHOD_TTFT)
        queue, own = self._queue
        mean = queue.mean_wait() + sum(own) / len(own)
        return Latency(mean, {share: queue.percentile(share, own) for share in SHARES}, METHOD_TTFT)

    def ttft_within(self, limit: float) -> float:
        """See Latency."""
        if self.decode.binding == "decode throughput":
            return 0.0
        queue, own = self._queue
        return queue.within(limit, own)


def full_step_s(cost: CostModel, workload: Workload) -> float:
    """Of a prefill step with as many mean prompts as it takes in; 0 where it takes one at most."""
    mean, cached = workload.prompt.mean, workload.prefix_share
    new, most = max(1.0, mean * (1 - cached)), cost.options.max_batch_tokens
    return cost.prefill_s(new, mean * cached) * most / new if most > new else 0.0


def exposed_s(prefill: CostModel, decode: CostModel, workload: Workload, replicas: tuple[int, int]) -> float:
    """Mean transfer time that computing does not hide, with the busier end's links shared; infinite when they are full.

    `replicas`: prefill and decode workers.
    """
    mean = workload.prompt.mean
    moved = prefill.transfer_bytes(mean, decode.tp) / prefill.bandwidth_to(decode.tp)
    load = workload.busiest * moved / min(replicas)
    if load >= 1:
        return math.inf
    new, cached = max(1.0, mean * (1 - workload.prefix_share)), mean * workload.prefix_share
    return prefill.transfer_s(mean, prefill.prefill_s(new, cached), load, decode.tp)
