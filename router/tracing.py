"""OpenTelemetry spans of requests; those of its phases are made when it ends, from what was measured of it.

    request                    from its arrival to its end
      queue                    in the router for P's lookahead, at D for blocks, at P for its turn
      prefill                  compute, at P
      transfer                 first frame to last acknowledgement; begins inside prefill when layers are sent early
      decode                   from the first token to the last

A request that carries a W3C `traceparent` goes on with its trace, and its answer says which span it was. Without
`router.traces` none of this is imported.
"""

from __future__ import annotations

import time
from typing import Any

from ..proto.errors import BatonError, ConfigError
from .live import Live


class Tracer:
    """Sends spans to an OTLP collector over gRPC, or to `exporter`."""

    def __init__(self, endpoint: str, router_id: str, exporter: Any = None) -> None:
        """Raises ConfigError where the libraries are not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))
        except ImportError as error:
            raise ConfigError(f"router.traces: needs {error.name}; pip install 'baton[traces]'") from error
        resource = Resource.create({"service.name": "baton-router", "service.instance.id": router_id})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton.router")
        self._propagator = TraceContextTextMapPropagator()
        self._wall = time.time() - time.monotonic()

    def begun(self, live: Live) -> None:
        """The span of a request that was accepted."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract({"traceparent": live.traceparent}) if live.traceparent else None
        begin, named = self._ns(live.record.received), {"request.id": live.request_id}
        live.span = self._tracer.start_span("request", context, SpanKind.SERVER, named, start_time=begin)

    def ended(self, live: Live, now: float, error: BatonError | None) -> None:
        """The rest, of a request that is over."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        root, record = live.span, live.record
        if root is None:
            return
        root.set_attributes(
            {
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": live.output.completion_tokens,
                "baton.prefill_worker": record.prefill_worker,
                "baton.decode_worker": record.decode_worker,
                "baton.kv_bytes": record.kv_bytes,
                "baton.attempts": 1 + live.life.retries,
            }
        )
        if error is not None:
            root.set_status(Status(StatusCode.ERROR, error.code))
        within = set_span_in_context(root)
        for phase in record.phases():
            span = self._tracer.start_span(phase.name, context=within, start_time=self._ns(phase.begin))
            span.end(end_time=self._ns(phase.end))
        root.end(end_time=self._ns(now))

    def close(self) -> None:
        """Sends what is left; blocks."""
        self._provider.shutdown()

    def _ns(self, moment: float) -> int:
        return int((moment + self._wall) * 1e9)
