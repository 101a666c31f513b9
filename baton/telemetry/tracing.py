"""Traces by OTLP over gRPC, and spans made from durations that other processes measured.

Attribute names are those of OpenTelemetry's GenAI conventions where they have one. Prompts and outputs are never
attributes.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracerProvider, Tracer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.util.types import AttributeValue

    from baton.core.settings import TelemetrySettings

OPERATION_NAME = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REQUEST_ID = "baton.request_id"
ATTEMPT_ID = "baton.attempt_id"
QUEUE_CLASS = "baton.queue_class"

_EXPORT_TIMEOUT_S = 2
_SCOPE = "baton"


class Tracing:
    """A component's tracer and what exports its spans. Owned by the component; ends with `shutdown`."""

    def __init__(self, tracer: Tracer, provider: TracerProvider | None) -> None:
        self._tracer = tracer
        self._provider = provider

    @property
    def tracer(self) -> Tracer:
        """Makes spans; without an exporter it only hands a caller's trace context on."""
        return self._tracer

    def shutdown(self) -> None:
        """Exports what is left. Blocks a few seconds at most when the collector is away: call it off the loop."""
        if self._provider:
            self._provider.shutdown()


def setup_tracing(settings: TelemetrySettings, service_name: str, incarnation: str) -> Tracing:
    """Tracing to `settings.otlp_endpoint`; with None nothing is recorded and spans cost next to nothing.

    A caller's decision to sample is followed; `trace_sample_ratio` decides for requests that come without one. Sets
    nothing global. Does not connect yet: a collector that is away costs spans, never requests.
    """
    if settings.otlp_endpoint is None:
        return Tracing(NoOpTracerProvider().get_tracer(_SCOPE), None)
    release = version("baton-serving")
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_sample_ratio)),
        resource=Resource(
            {
                "service.namespace": "baton",
                "service.name": service_name,
                "service.instance.id": incarnation,
                "service.version": release,
            }
        ),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(
        endpoint=settings.otlp_endpoint,
        insecure=settings.otlp_endpoint.startswith("http://"),
        timeout=_EXPORT_TIMEOUT_S,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer(_SCOPE, release), provider)


def phase_span(
    tracer: Tracer,
    name: str,
    duration_s: float,
    *,
    ended_ago_s: float = 0.0,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> None:
    """Records a phase that lasted `duration_s` and ended `ended_ago_s` ago, as a child of the current span.

    Engine processes report durations and make no spans; the server process places them on its own clock.
    """
    end_ns = time.time_ns() - round(ended_ago_s * 1e9)
    span = tracer.start_span(name, start_time=end_ns - round(duration_s * 1e9), attributes=attributes)
    span.end(end_ns)
