"""What a request is doing now: a name for errors, and a span around each part of its way."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import Status, StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.trace import Span, Tracer


class Phases:
    """One request's. `name` is the phase that was entered last."""

    def __init__(self, tracer: Tracer) -> None:
        self.name = "arrival"
        self._tracer = tracer

    @contextmanager
    def enter(self, name: str) -> Iterator[Span]:
        """A span around one phase. Error messages stay out of it: they may quote what a client sent."""
        self.name = name
        with self._tracer.start_as_current_span(
            f"gateway.{name}", record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR))
                span.set_attribute("error.type", type(error).__name__)
                raise
