from __future__ import annotations

import asyncio
import time

from opentelemetry import trace

from baton.core.settings import TelemetrySettings
from baton.telemetry.tracing import REQUEST_MODEL, Tracing, phase_span, setup_tracing


def tracing_to(endpoint: str | None, ratio: float = 1.0) -> Tracing:
    return setup_tracing(
        TelemetrySettings(otlp_endpoint=endpoint, trace_sample_ratio=ratio), "gateway", "0123456789abcdef"
    )


async def test_spans_reach_the_collector_with_their_resource(collector) -> None:
    tracing = tracing_to(collector.endpoint)
    before_ns = time.time_ns()
    with tracing.tracer.start_as_current_span("request"):
        phase_span(tracing.tracer, "prefill", 0.5, ended_ago_s=0.25, attributes={REQUEST_MODEL: "tiny"})
    after_ns = time.time_ns()
    await asyncio.to_thread(tracing.shutdown)
    request, prefill = collector.spans()["request"], collector.spans()["prefill"]
    assert prefill.parent_span_id == request.span_id
    assert prefill.trace_id == request.trace_id
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == 500_000_000
    assert before_ns - 250_000_000 <= prefill.end_time_unix_nano <= after_ns - 250_000_000
    assert {a.key: a.value.string_value for a in prefill.attributes} == {"gen_ai.request.model": "tiny"}
    resource = {
        attribute.key: attribute.value.string_value
        for attribute in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "gateway"
    assert resource["service.namespace"] == "baton"
    assert resource["service.instance.id"] == "0123456789abcdef"


async def test_a_callers_decision_to_sample_is_followed(collector) -> None:
    tracing = tracing_to(collector.endpoint, ratio=0.0)
    for name, flags in (("sampled", trace.TraceFlags.SAMPLED), ("unsampled", trace.TraceFlags.DEFAULT)):
        parent = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(flags))
        with trace.use_span(trace.NonRecordingSpan(parent)):
            phase_span(tracing.tracer, name, 0.1)
    phase_span(tracing.tracer, "own", 0.1)
    await asyncio.to_thread(tracing.shutdown)
    assert set(collector.spans()) == {"sampled"}


async def test_a_collector_that_is_away_delays_no_end() -> None:
    tracing = tracing_to("http://127.0.0.1:9")
    phase_span(tracing.tracer, "lost", 0.1)
    started_s = time.monotonic()
    await asyncio.to_thread(tracing.shutdown)
    assert time.monotonic() - started_s < 10


def test_without_an_endpoint_nothing_is_recorded_and_a_trace_is_handed_on() -> None:
    tracing = tracing_to(None)
    assert not tracing.tracer.start_span("x").is_recording()
    parent = trace.SpanContext(1, 2, is_remote=True)
    with trace.use_span(trace.NonRecordingSpan(parent)):
        assert tracing.tracer.start_span("x").get_span_context() == parent
    tracing.shutdown()


def test_nothing_global_is_set(collector) -> None:
    tracing = tracing_to(collector.endpoint)
    assert not trace.get_tracer("other").start_span("x").is_recording()
    tracing.shutdown()
