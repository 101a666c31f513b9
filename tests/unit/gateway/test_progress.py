from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import UnavailableError
from baton.core.generation import FinishReason
from baton.telemetry.instruments import GatewayInstruments, new_registry
from gateway.events import Timings
from gateway.progress import Progress

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def progress(clock: ManualClock, registry: CollectorRegistry) -> Progress:
    return Progress(clock, GatewayInstruments(registry))


def test_a_whole_way(clock: ManualClock, progress: Progress, registry: CollectorRegistry) -> None:
    with progress.outcome():
        clock.advance(1)
        progress.tokenized()
        clock.advance(2)
        progress.admitted("chat", 7)
        assert registry.get_sample_value("baton_num_requests_waiting", {"queue_class": "chat"}) == 1
        clock.advance(4)
        progress.granted()
        assert registry.get_sample_value("baton_num_requests_waiting", {"queue_class": "chat"}) == 0
        assert registry.get_sample_value("baton_num_requests_running") == 1
        clock.advance(8)
        progress.first_token()
        clock.advance(16)
        progress.handed_over()
        clock.advance(32)
        progress.tokens(2)
        clock.advance(64)
        progress.tokens(1)
        clock.advance(128)
        timings = progress.finished(FinishReason.LENGTH)
    assert timings == Timings(
        tokenize_s=1,
        queue_s=4,
        prefill_s=8,
        handover_s=16,
        decode_s=96,
        time_to_first_token_s=15,
        total_s=255,
    )
    labels = {"queue_class": "chat"}
    assert registry.get_sample_value("baton_num_requests_running") == 0
    assert registry.get_sample_value("baton_requests_total", {"outcome": "length"}) == 1
    assert registry.get_sample_value("baton_prompt_tokens_total") == 7
    assert registry.get_sample_value("baton_generation_tokens_total") == 4
    # Gaps as a client sees them: from the first token to each message, none inside one.
    assert registry.get_sample_value("baton_inter_token_latency_seconds_sum", labels) == 16 + 32 + 64
    assert registry.get_sample_value("baton_inter_token_latency_seconds_count", labels) == 3
    assert registry.get_sample_value("baton_time_per_output_token_seconds_sum", labels) == (16 + 32 + 64) / 3
    assert registry.get_sample_value("baton_time_to_first_token_seconds_sum", labels) == 15
    assert registry.get_sample_value("baton_request_queue_time_seconds_sum", labels) == 4
    assert registry.get_sample_value("baton_prefill_time_seconds_sum", labels) == 8
    assert registry.get_sample_value("baton_handover_time_seconds_sum") == 16
    assert registry.get_sample_value("baton_e2e_request_latency_seconds_sum", labels) == 255


def test_one_token_has_no_decode(clock: ManualClock, progress: Progress) -> None:
    progress.tokenized()
    progress.admitted("chat", 1)
    progress.granted()
    clock.advance(1)
    progress.first_token()
    clock.advance(1)
    timings = progress.finished(FinishReason.STOP)
    assert (timings.handover_s, timings.decode_s, timings.prefill_s) == (0, 0, 1)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnavailableError("x", reason="NO_WORKER"), "no_worker"),
        (asyncio.CancelledError(), "cancelled"),
        (RuntimeError("x"), "internal"),
    ],
)
def test_each_end_is_counted_and_leaves_the_gauges_at_zero(
    progress: Progress, registry: CollectorRegistry, error: BaseException, outcome: str
) -> None:
    def fail() -> None:
        with progress.outcome():
            progress.admitted("long", 1)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert registry.get_sample_value("baton_requests_total", {"outcome": outcome}) == 1
    assert registry.get_sample_value("baton_num_requests_waiting", {"queue_class": "long"}) == 0
    assert registry.get_sample_value("baton_num_requests_running") == 0


def test_a_lost_worker_moves_no_point_that_was_passed(
    clock: ManualClock, progress: Progress, registry: CollectorRegistry
) -> None:
    with progress.outcome():
        progress.admitted("chat", 7)
        clock.advance(1)
        progress.granted()
        clock.advance(2)
        progress.first_token()
        clock.advance(4)
        progress.lost_worker("decode")
        assert registry.get_sample_value("baton_num_requests_waiting", {"queue_class": "chat"}) == 1
        assert registry.get_sample_value("baton_num_requests_running") == 0
        assert registry.get_sample_value("baton_retries_total", {"role": "decode"}) == 1
        clock.advance(8)
        progress.granted()
        assert registry.get_sample_value("baton_num_requests_waiting", {"queue_class": "chat"}) == 0
        assert registry.get_sample_value("baton_num_requests_running") == 1
        clock.advance(16)
        progress.tokens(1)
        progress.handed_over()
        clock.advance(32)
        progress.tokens(1)
        progress.lost_worker("decode")
        progress.granted()
        clock.advance(64)
        progress.handed_over()
        progress.tokens(1)
        timings = progress.finished(FinishReason.LENGTH)
    assert (timings.queue_s, timings.prefill_s, timings.time_to_first_token_s) == (1, 2, 3)
    assert (timings.handover_s, timings.decode_s, timings.total_s) == (28, 96, 127)
    assert registry.get_sample_value("baton_generation_tokens_total") == 4
    assert registry.get_sample_value("baton_request_queue_time_seconds_count", {"queue_class": "chat"}) == 1
    assert registry.get_sample_value("baton_num_requests_running") == 0


def test_a_grant_that_is_lost_before_it_is_heard_of_waits_once(progress: Progress, registry: CollectorRegistry) -> None:
    labels = {"queue_class": "chat"}
    with progress.outcome():
        progress.admitted("chat", 7)
        progress.lost_worker("unknown")
        assert registry.get_sample_value("baton_num_requests_waiting", labels) == 1
        progress.granted()
        assert registry.get_sample_value("baton_num_requests_waiting", labels) == 0
    assert registry.get_sample_value("baton_num_requests_running") == 0
