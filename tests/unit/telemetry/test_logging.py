from __future__ import annotations

import io
import json
import logging

import pytest
from opentelemetry import trace

from baton.core.settings import TelemetrySettings
from baton.core.start_up import LOGGER_NAME, StartPhases
from baton.telemetry.logging import setup_logging


@pytest.fixture(autouse=True)
def _restore():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    start_up = logging.getLogger(LOGGER_NAME)
    start_up.handlers[:], start_up.propagate = [], True
    start_up.setLevel(logging.NOTSET)
    for name in ("__main__", "baton", "gateway", "prefill_worker", "decode_worker", "kv_transfer"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_json_lines_carry_level_component_values_and_trace() -> None:
    out = io.StringIO()
    setup_logging(TelemetrySettings(log_format="json"), "gateway", out)
    span = trace.NonRecordingSpan(trace.SpanContext(0xAB, 0xCD, is_remote=False))
    with trace.use_span(span):
        logging.getLogger("gateway.session").info("granted", extra={"queue_s": 0.5})
    line = json.loads(out.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "granted",
        "level": "info",
        "logger": "gateway.session",
        "component": "gateway",
        "queue_s": 0.5,
        "trace_id": f"{0xAB:032x}",
        "span_id": f"{0xCD:016x}",
    }


def test_the_level_is_ours_and_libraries_are_heard_from_warning_up() -> None:
    out = io.StringIO()
    setup_logging(TelemetrySettings(log_level="debug", log_format="json"), "gateway", out)
    logging.getLogger("baton.rpc").debug("ours")
    logging.getLogger("somelibrary").info("noise")
    logging.getLogger("somelibrary").warning("trouble")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["ours", "trouble"]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_values_of_variables(log_format: str) -> None:
    out = io.StringIO()
    setup_logging(TelemetrySettings(log_format=log_format), "gateway", out)

    def fail(prompt: str) -> None:
        raise ValueError("bug")

    try:
        fail("".join(["se", "cret ", "prompt"]))
    except ValueError:
        logging.getLogger("gateway").exception("failed")
    assert "ValueError: bug" in out.getvalue()
    assert "secret prompt" not in out.getvalue()


def test_a_second_setup_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging(TelemetrySettings(), "gateway", first)
    setup_logging(TelemetrySettings(), "gateway", second)
    logging.getLogger("gateway").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_the_phases_of_a_start_are_in_the_log_with_their_seconds() -> None:
    out = io.StringIO()
    setup_logging(TelemetrySettings(log_format="json"), "gateway", out)
    phases = StartPhases()
    phases.begin("load")
    phases.end()
    first, last = (json.loads(line) for line in out.getvalue().splitlines())
    assert first["event"] == "start-up: load"
    assert (last["phase"], last["event"]) == ("load", "start-up: done (load took 0.0 s)")
    assert 0 <= last["duration_s"] < 1


def test_a_supervisor_gets_the_phases_in_short_lines_whatever_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    setup_logging(TelemetrySettings(log_level="error", show_start=True), "gateway", out)
    StartPhases().begin("load")
    assert capsys.readouterr().out == "start-up: load\n"
    assert out.getvalue() == ""
