"""What traced requests carry: W3C's `traceparent`, and the phases that become spans (tracing.py)."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from opentelemetry.trace import Span

parent: ContextVar[str] = ContextVar("traceparent", default="")  # as the client sent it


def traceparent(span: Span) -> str:
    """The W3C header that names a span."""
    at = span.get_span_context()
    return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"


class Phase(NamedTuple):
    """A part of a request: seconds of the router's monotonic clock."""

    name: str
    begin: float
    end: float
