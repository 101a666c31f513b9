"""Log lines for people or programs, with the trace they belong to.

Modules log through the standard library (`logging.getLogger(__name__)`, values in `extra`); this renders them.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TextIO

import structlog
from opentelemetry import trace

from baton.core.start_up import LOGGER_NAME

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

    from baton.core.settings import TelemetrySettings

_OWN = ("__main__", "baton", "gateway", "prefill_worker", "decode_worker", "kv_transfer")


def setup_logging(settings: TelemetrySettings, component: str, stream: TextIO = sys.stderr) -> None:
    """Makes the process's log go to `stream`, as the settings say. Libraries are heard from WARNING up.

    Replaces what was set up before.
    """

    def add_component(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["component"] = component
        return event

    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_component,
        _add_trace,
    ]
    last: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if settings.log_format == "json":
        last += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        last.append(
            structlog.dev.ConsoleRenderer(
                # The default formatter shows local variables, and prompts are among them.
                colors=stream.isatty(),
                exception_formatter=structlog.dev.plain_traceback,
            )
        )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=last))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _OWN:
        logging.getLogger(name).setLevel(settings.log_level.upper())
    start_up = logging.getLogger(LOGGER_NAME)
    start_up.handlers[:] = [logging.StreamHandler(sys.stdout)] if settings.show_start else []
    start_up.propagate = not settings.show_start
    start_up.setLevel(logging.INFO if settings.show_start else logging.NOTSET)


def _add_trace(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event
