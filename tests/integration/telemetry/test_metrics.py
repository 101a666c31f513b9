from __future__ import annotations

import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.errors import StartupError
from baton.core.settings import TelemetrySettings
from baton.telemetry.instruments import GatewayInstruments, WorkerInstruments, new_registry
from baton.telemetry.metrics import start_metrics


def scrape(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


async def test_the_endpoint_shows_what_was_recorded() -> None:
    registry = new_registry()
    instruments = GatewayInstruments(registry)
    instruments.time_to_first_token.labels("chat").observe(0.03)
    instruments.requests.labels("stop").inc()
    instruments.num_requests_running.set(3)
    endpoint = start_metrics(TelemetrySettings(metrics_port=0), registry, "127.0.0.1")
    assert endpoint is not None
    try:
        families = await asyncio.to_thread(scrape, endpoint.port)
    finally:
        await asyncio.to_thread(endpoint.close)
    samples = {
        (sample.name, sample.labels.get("le", "")): sample.value
        for sample in families["baton_time_to_first_token_seconds"].samples
    }
    assert samples["baton_time_to_first_token_seconds_bucket", "0.02"] == 0
    assert samples["baton_time_to_first_token_seconds_bucket", "0.04"] == 1
    assert families["baton_num_requests_running"].samples[0].value == 3
    assert families["baton_requests"].samples[0].labels == {"outcome": "stop"}
    assert "process_resident_memory_bytes" in families


def test_a_taken_port_is_named() -> None:
    first = start_metrics(TelemetrySettings(metrics_port=0), new_registry(), "127.0.0.1")
    assert first is not None
    try:
        with pytest.raises(StartupError, match=rf"^telemetry.metrics_port: .*:{first.port}: Address already in use$"):
            start_metrics(TelemetrySettings(metrics_port=first.port), new_registry(), "127.0.0.1")
    finally:
        first.close()
    again = start_metrics(TelemetrySettings(metrics_port=first.port), new_registry(), "127.0.0.1")
    assert again is not None
    again.close()


def test_no_port_means_off() -> None:
    assert start_metrics(TelemetrySettings(), new_registry(), "127.0.0.1") is None


def test_components_in_one_process_share_no_instrument() -> None:
    first, second = WorkerInstruments(new_registry()), WorkerInstruments(new_registry())
    first.num_requests_running.set(1)
    assert second.num_requests_running._value.get() == 0
