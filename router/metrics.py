"""What /metrics exports: baton's own names and the `vllm:` ones that routers, autoscalers and dashboards query.

Events are counters and histograms; gauges are read at scrape time from the live state and the workers' latest load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..proto import worker_pb2 as pb
from .record import Record

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_BYTES = tuple(float(1 << power) for power in range(12, 36, 2))
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class WorkerState(NamedTuple):
    """One worker as its session knows it."""

    worker: str
    role: str
    welcome: pb.Welcome
    load: pb.Load
    known_blocks: int  # of its prefix cache, that placement goes by


class RouterState(NamedTuple):
    """The router's own gauges."""

    inflight: int  # requests accepted and not ended
    queued: int  # of these, those without a first token
    reserving: int  # legs that wait for decode blocks
    workers: Sequence[WorkerState]


class Gaps(Collector):
    """The histogram of inter-token latencies and the count of tokens, under both names: with as little work per token
    as possible, since there is nothing else that every token of every stream passes through."""

    def __init__(self, model: str) -> None:
        self._labels = {"baton_": {"model_name": model}, "vllm:": {"model_name": model, "engine": "0"}}
        self._counts = [0] * (len(_GAP) + 1)
        self._sum = 0.0
        self._tokens = 0

    def observe(self, gap_s: float | None, times: int) -> None:
        """`times` tokens came, each `gap_s` after the one before it; None: the first of a choice."""
        self._tokens += times
        if gap_s is not None:
            self._counts[bisect_left(_GAP, gap_s)] += times
            self._sum += gap_s * times

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        """One histogram and one counter for each name."""
        for prefix, labels in self._labels.items():
            name = f"{prefix}inter_token_latency_seconds"
            family = HistogramMetricFamily(name, "Inter token latency seconds", labels=list(labels))
            bounds = [*map(str, map(float, _GAP)), "+Inf"]
            family.add_metric(
                list(labels.values()), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum
            )
            yield family
            total = CounterMetricFamily(f"{prefix}generation_tokens", "Tokens given out", labels=list(labels))
            total.add_metric(list(labels.values()), self._tokens)
            yield total


class _Both:
    """One observation under our own name and under vLLM's."""

    def __init__(self, own: Histogram, alias: Histogram) -> None:
        self._own, self._alias = own, alias

    def observe(self, value: float) -> None:
        self._own.observe(value)
        self._alias.observe(value)


class Metrics:
    """The metrics of one router, in a registry of their own."""

    def __init__(self, model: str, state: Callable[[], RouterState]) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.accepted = self._counter("baton_requests_accepted", "Requests that passed validation and were taken")
        self.completed = self._counter("baton_requests_completed", "Requests that ended with all choices finished")
        self.failed = self._counter("baton_requests_failed", "Requests that ended with an error", "code")
        self.cancelled = self._counter("baton_requests_cancelled", "Requests whose client left")
        self.rejections = self._counter("baton_rejections", "Requests refused before they were taken", "reason")
        self.cancellations = self._counter(
            "baton_cancellations", "Cancelled requests by the phase they were in", "phase"
        )
        self.prefilled_on_decode = self._counter(
            "baton_prefilled_on_decode", "Prompts that the decode worker computed itself"
        )
        self.retries = self._counter("baton_retries", "Legs placed again after a failure", "leg")
        self.migrations = self._counter("baton_migrations", "Legs placed again: not begun, or in mid-answer", "kind")
        self.handovers = self._counter("baton_legs_handed_over", "Legs that went on with KV that existed", "cause")
        self.recomputed_tokens = self._counter("baton_recomputed_tokens", "Tokens prefilled again for later legs")
        self.preemptions = self._counter("baton_preemptions", "Choices that a decode worker gave back")
        self.transfers = self._counter("baton_kv_transfers", "KV transfers by how they ended", "outcome")
        self.link_bytes = self._counter("baton_kv_link_bytes", "KV moved between two workers", "prefill", "decode")
        self.prompt_tokens = self._counters("prompt_tokens", "Prompt tokens of requests that were prefilled")
        self.cached_tokens = self._counters("prompt_tokens_cached", "Of these, found in prefill prefix caches")
        self.finished = self._counters("request_success", "Choices by finish reason", "finished_reason")
        self.ttft = self._both("time_to_first_token_seconds", "time_to_first_token_seconds", _TTFT)
        self.gaps = Gaps(model)
        self.registry.register(self.gaps)
        self.tpot = self._both("time_per_output_token_seconds", "request_time_per_output_token_seconds", _GAP)
        self.e2e = self._both("e2e_request_seconds", "e2e_request_latency_seconds", _LONG)
        self.queue = self._both("request_queue_seconds", "request_queue_time_seconds", _LONG)
        self.prefill = self._both("request_prefill_seconds", "request_prefill_time_seconds", _LONG)
        self.decode = self._both("request_decode_seconds", "request_decode_time_seconds", _LONG)
        self.prompt_length = self._both("request_prompt_tokens", "request_prompt_tokens", _TOKENS)
        self.output_length = self._both("request_generation_tokens", "request_generation_tokens", _TOKENS)
        self.first_text = self._histogram("baton_time_to_first_text_seconds", "First text not held back", _TTFT)
        self.second_token = self._histogram("baton_first_to_second_token_seconds", "The hand-off gap", _SHORT)
        self.alloc_wait = self._histogram("baton_kv_alloc_wait_seconds", "Wait for decode blocks", _SHORT)
        self.transfer_seconds = self._histogram("baton_kv_transfer_seconds", "First frame to last ack", _SHORT)
        self.transfer_bytes = self._histogram("baton_kv_transfer_bytes", "KV moved per transfer", _BYTES)
        self.loop_lag = self._histogram("baton_event_loop_lag_seconds", "By how much the loop came late", _SHORT)
        self.registry.register(_RouterGauges(model, state))
        self._workers = CollectorRegistry()
        self._workers.register(_WorkersState(model, state))

    def first_token(self, ttft_s: float, queue_s: float, prefill_s: float) -> None:
        """A request's first token was given out."""
        self.ttft.observe(ttft_s)
        self.queue.observe(queue_s)
        self.prefill.observe(prefill_s)

    def completion(self, record: Record, tokens: int, longest: int, now: float) -> None:
        """A request ended well. tokens: over all choices; longest: of the longest choice."""
        self.completed.inc()
        self.e2e.observe(now - record.received)
        self.decode.observe(record.decode_s)
        self.prompt_length.observe(record.prompt_tokens)
        self.output_length.observe(tokens)
        if longest > 1:
            self.tpot.observe(record.decode_s / (longest - 1))
        if record.first_text_at is not None:
            self.first_text.observe(record.first_text_at - record.received)

    def render(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        return self.render_own() + self.render_workers()

    def render_own(self) -> bytes:
        """What this router counted."""
        return generate_latest(self.registry)

    def render_workers(self) -> bytes:
        """What the workers say of themselves, the same to every router."""
        return generate_latest(self._workers)

    def _labels(self, name: str) -> dict[str, str]:
        return {"model_name": self._model, "engine": "0"} if name.startswith("vllm:") else {"model_name": self._model}

    def _counter(self, name: str, text: str, *labels: str) -> _LabelledCounter:
        return _LabelledCounter([self._bare(name, text, labels)], labels)

    def _counters(self, name: str, text: str, *labels: str) -> _LabelledCounter:
        return _LabelledCounter([self._bare(f"{prefix}{name}", text, labels) for prefix in ("baton_", "vllm:")], labels)

    def _bare(self, name: str, text: str, labels: Sequence[str]) -> _Bare:
        own = self._labels(name)
        return _Bare(Counter(name, text, [*own, *labels], registry=self.registry), own)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        own = self._labels(name)
        return Histogram(name, text, list(own), registry=self.registry, buckets=buckets).labels(**own)

    def _both(self, own: str, alias: str, buckets: Sequence[float]) -> _Both:
        text = own.replace("_", " ").capitalize()
        return _Both(self._histogram(f"baton_{own}", text, buckets), self._histogram(f"vllm:{alias}", text, buckets))


class _Bare(NamedTuple):
    counter: Counter
    fixed: dict[str, str]  # the model's labels


class _LabelledCounter:
    """A counter under one or two names, whose model labels are filled in already."""

    def __init__(self, counters: Sequence[_Bare], labels: Sequence[str]) -> None:
        self._counters, self._names = counters, labels
        if not labels:
            self.inc(by=0)  # exported as 0 from the start

    def inc(self, *values: str, by: float = 1) -> None:
        """Adds `by` under the given label values."""
        labels = dict(zip(self._names, values, strict=True))
        for counter, fixed in self._counters:
            counter.labels(**fixed, **labels).inc(by)


_WORKER_GAUGES: dict[str, tuple[str, Callable[[WorkerState], float]]] = {
    "baton_worker_running": ("Sequences in the batch", lambda w: w.load.running),
    "baton_worker_waiting": ("Queued prompts or reservations", lambda w: w.load.waiting),
    "baton_kv_used_blocks": ("Blocks in use", lambda w: w.load.used_blocks),
    "baton_kv_cached_blocks": ("Blocks of the prefix cache that can be evicted", lambda w: w.load.cached_blocks),
    "baton_kv_total_blocks": ("Blocks of the pool", lambda w: w.welcome.total_blocks),
    "baton_kv_pool_use": ("Part of the pool in use, 0 to 1", lambda w: _use([w])),
    "baton_spec_decode_acceptance_rate": ("Accepted part of proposed tokens, 0 to 1", lambda w: _acceptance(w.load)),
    "baton_spec_decode_mean_accepted_length": ("Tokens of a step with proposals", lambda w: _accepted_length(w.load)),
    "baton_kv_held_legs": ("Legs whose blocks wait for the other side", lambda w: w.load.held_legs),
}
_WORKER_COUNTERS: dict[str, tuple[str, Callable[[WorkerState], float]]] = {
    "baton_worker_steps": ("Engine steps", lambda w: w.load.steps),
    "baton_worker_preemptions": ("Sequences preempted", lambda w: w.load.preemptions),
    "baton_prefix_hit_tokens": ("Prompt tokens found in the prefix cache", lambda w: w.load.prefix_hit_tokens),
    "baton_prefix_query_tokens": ("Prompt tokens looked up", lambda w: w.load.prefix_query_tokens),
    "baton_computed_prompt_tokens": ("Prompt tokens computed", lambda w: w.load.computed_prompt_tokens),
    "baton_spec_decode_drafts": ("Steps of a sequence with proposed tokens", lambda w: w.load.spec_drafts),
    "baton_spec_decode_draft_tokens": ("Tokens proposed", lambda w: w.load.spec_draft_tokens),
    "baton_spec_decode_accepted_tokens": ("Of these, drawn by the model", lambda w: w.load.spec_accepted_tokens),
    "baton_fetched_prompt_tokens": ("Taken over from decode workers", lambda w: w.load.fetched_prompt_tokens),
}
_ROLE_GAUGES: dict[str, tuple[str, str, Callable[[pb.Load], float]]] = {
    "baton_prefill_waiting_requests": ("prefill", "Prompts before their first chunk", lambda load: load.waiting),
    "baton_prefill_running_requests": ("prefill", "Prompts being computed", lambda load: load.running),
    "baton_prefill_inflight_queue_requests": ("prefill", "Prompts done, KV not taken", lambda load: load.held_legs),
    "baton_decode_prealloc_queue_requests": ("decode", "Reservations that wait for blocks", lambda load: load.waiting),
    "baton_decode_transfer_queue_requests": ("decode", "Blocks reserved, KV arriving", lambda load: load.held_legs),
    "baton_decode_running_requests": ("decode", "Sequences in the batch", lambda load: load.running),
}


def _acceptance(load: pb.Load) -> float:
    return load.spec_accepted_tokens / load.spec_draft_tokens if load.spec_draft_tokens else 0.0


def _accepted_length(load: pb.Load) -> float:
    """The token that is drawn in any case included, as others count it."""
    return 1 + load.spec_accepted_tokens / load.spec_drafts if load.spec_drafts else 0.0


def _use(workers: Iterable[WorkerState]) -> float:
    """Used part of these workers' pools, 0..1."""
    states = list(workers)
    total = sum(worker.welcome.total_blocks for worker in states)
    return sum(worker.load.used_blocks for worker in states) / total if total else 0.0


class _LiveState(Collector):
    """Read when scraped."""

    def __init__(self, model: str, state: Callable[[], RouterState]) -> None:
        self._model = model
        self._state = state

    def describe(self) -> Iterable[Metric]:
        return ()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _alias(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, name.removeprefix("vllm:").replace("_", " "), labels=["model_name", "engine"])
        family.add_metric([self._model, "0"], value)
        return family


class _RouterGauges(_LiveState):
    """The router's own."""

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        yield self._gauge("baton_router_inflight_requests", "Requests accepted and not ended", state.inflight)
        yield self._gauge("baton_router_queued_requests", "Of these, without a first token", state.queued)
        text = "Legs that wait for decode blocks"
        yield self._gauge("baton_prefill_prealloc_queue_requests", text, state.reserving)
        yield self._alias("vllm:num_requests_waiting", state.queued)
        yield from self._known(state)

    def _known(self, state: RouterState) -> Iterator[Metric]:
        text = "Cached blocks that this router knows the worker to hold"
        family = GaugeMetricFamily("baton_prefix_known_blocks", text, labels=["model_name", "worker", "role"])
        for worker in state.workers:
            family.add_metric([self._model, worker.worker, worker.role], worker.known_blocks)
        yield family


class _WorkersState(_LiveState):
    """Workers' gauges and counters."""

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for name, (text, gauge) in _WORKER_GAUGES.items():
            family: Metric = GaugeMetricFamily(name, text, labels=["model_name", "worker", "role"])
            yield self._fill(family, state, gauge)
        for name, (text, count) in _WORKER_COUNTERS.items():
            yield self._fill(CounterMetricFamily(name, text, labels=["model_name", "worker", "role"]), state, count)
        for name, (role, text, value) in _ROLE_GAUGES.items():
            yield self._gauge(name, text, sum(value(w.load) for w in state.workers if w.role == role))
        yield from self._aliases(state)

    def _fill(self, family: Metric, state: RouterState, value: Callable[[WorkerState], float]) -> Metric:
        for worker in state.workers:
            labels = {"model_name": self._model, "worker": worker.worker, "role": worker.role}
            suffix = "_total" if family.type == "counter" else ""
            family.add_sample(family.name + suffix, labels, value(worker))
        return family

    def _aliases(self, state: RouterState) -> Iterator[Metric]:
        decode = [worker for worker in state.workers if worker.role == "decode"]
        yield self._alias("vllm:num_requests_running", sum(worker.load.running for worker in state.workers))
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._alias(name, _use(decode))
        counters: dict[str, Callable[[pb.Load], int]] = {
            "vllm:num_preemptions": lambda load: load.preemptions,
            "vllm:spec_decode_num_drafts": lambda load: load.spec_drafts,
            "vllm:spec_decode_num_draft_tokens": lambda load: load.spec_draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": lambda load: load.spec_accepted_tokens,
            "vllm:prefix_cache_queries": lambda load: load.prefix_query_tokens,
            "vllm:prefix_cache_hits": lambda load: load.prefix_hit_tokens,
        }
        for name, count in counters.items():
            total = CounterMetricFamily(
                name, name.removeprefix("vllm:").replace("_", " "), labels=["model_name", "engine"]
            )
            total.add_metric([self._model, "0"], sum(count(worker.load) for worker in state.workers))
            yield total
        info = GaugeMetricFamily("vllm:cache_config_info", "Pool", labels=["engine", "block_size", "num_gpu_blocks"])
        for index, worker in enumerate(decode):
            info.add_metric([str(index), str(worker.welcome.block_size), str(worker.welcome.total_blocks)], 1)
        yield info
