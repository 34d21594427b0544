"""Spans nest as the phases did, go on with the client's trace, and say how a request failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from baton.proto import baton_pb2 as api
from baton.router import tracing
from baton.tests.harness.router_rig import router_rig, say
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_spans_nest_and_follow_the_clients_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, tracers = InMemorySpanExporter(), []

    class Kept(tracing.Tracer):
        def __init__(self, endpoint: str, router_id: str) -> None:
            super().__init__(endpoint, router_id, exporter)
            tracers.append(self)

    monkeypatch.setattr("baton.router.core.Tracer", Kept)
    async with router_rig(tmp_path, "prefill-0", "decode-0", traces="http://127.0.0.1:4317") as rig:
        rig.cluster.script = say("hello")
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 8}
        answer = await rig.http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
        assert answer.status_code == 200
        streamed = await rig.http.post("/v1/completions", json={**body, "stream": True})
        call = rig.stub.Generate(api.GenerateRequest(prompt="hi", max_tokens=8), metadata=(("traceparent", PARENT),))
        async for _ in call:
            pass
        told = [answer.headers["traceparent"], streamed.headers["traceparent"]]
        told.append(dict(await call.initial_metadata())["traceparent"])
        await rig.generate(prompt="hi", max_tokens=8)
        tracers[0]._provider.force_flush()
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.name == "request"]
    assert [root.parent is not None for root in roots] == [True, False, True, False]
    assert told == [
        f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-{root.context.trace_flags:02x}"
        for root in roots[:3]
    ]
    for root in roots[0], roots[2]:
        assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
        assert root.parent is not None
        assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    assert roots[0].attributes is not None
    assert answer.headers["x-request-id"] == roots[0].attributes["request.id"]
    for root in roots:
        parts = {s.name: s for s in spans if s.parent is not None and s.parent.span_id == root.context.span_id}
        assert set(parts) == {"queue", "prefill", "transfer", "decode"}
        assert root.start_time is not None
        assert root.end_time is not None
        for span in parts.values():
            assert span.start_time is not None
            assert span.end_time is not None
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time
        assert parts["queue"].end_time == parts["prefill"].start_time
        assert (parts["prefill"].start_time or 0) <= (parts["transfer"].start_time or 0)
