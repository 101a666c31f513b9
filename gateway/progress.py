"""How far a request has come: its timings, and the metrics that they feed."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton.core.errors import ServingError
from gateway.events import Timings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.core.clock import Clock
    from baton.core.generation import FinishReason
    from baton.telemetry.instruments import GatewayInstruments


class Progress:
    """One request's readings of this process's clock, taken when it passes each point of its way.

    A point that a request never passed lies at the one before it, so the time in between is 0. Calls come in the
    order of the methods; `outcome` is around them all. After `lost_worker` they go on from `granted` without
    `first_token`, once it was called; so they do after `waits_again`. Each point lies where it was passed first.
    """

    def __init__(self, clock: Clock, instruments: GatewayInstruments) -> None:
        self._clock = clock
        self._instruments = instruments
        self._queue_class = ""
        self._is_waiting = self._is_running = False
        self._was_granted = self._was_handed_over = False
        self._reason: FinishReason | None = None
        self._num_tokens = 0
        self._arrived = clock.monotonic_s()
        self._tokenized = self._admitted = self._granted = self._first_token = self._arrived
        self._has_cache = self._arrived
        # When the last token of each choice came.
        self._last_tokens: list[float] = []

    @contextmanager
    def outcome(self) -> Iterator[None]:
        """Counts how the request ends, whatever happens inside the block; lets every error through."""
        outcome = "internal"
        try:
            yield
            outcome = self._reason.value if self._reason else "unspecified"
        except ServingError as error:
            outcome = error.reason.lower()
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._ended(outcome)

    def tokenized(self) -> None:
        """The prompt's ids are known."""
        self._tokenized = self._clock.monotonic_s()

    def admitted(self, queue_class: str, prompt_tokens: int) -> None:
        """The request has a place in the queue."""
        self._admitted = self._clock.monotonic_s()
        self._queue_class = queue_class
        self._is_waiting = True
        self._instruments.num_requests_waiting.labels(queue_class).inc()
        self._instruments.prompt_tokens.inc(prompt_tokens)

    def granted(self) -> None:
        """The request has a pair of workers."""
        self._stop_waiting()
        self._is_running = True
        self._instruments.num_requests_running.inc()
        if self._was_granted:
            return
        self._was_granted = True
        self._granted = self._clock.monotonic_s()
        self._instruments.request_queue_time.labels(self._queue_class).observe(self._granted - self._admitted)

    def first_token(self, num_choices: int = 1) -> None:
        """The first token of each choice is here; so far it is the last one too."""
        self._first_token = self._has_cache = self._clock.monotonic_s()
        self._last_tokens = [self._first_token] * num_choices
        self._num_tokens = num_choices
        self._instruments.generation_tokens.inc(num_choices)
        self._instruments.prefill_time.labels(self._queue_class).observe(self._first_token - self._granted)
        self._instruments.time_to_first_token.labels(self._queue_class).observe(self._first_token - self._arrived)

    def handed_over(self) -> None:
        """The decode worker has the KV cache."""
        if self._was_handed_over:
            return
        self._was_handed_over = True
        self._has_cache = self._clock.monotonic_s()
        self._instruments.handover_time.observe(self._has_cache - self._first_token)

    def tokens(self, num_tokens: int, choice: int = 0) -> None:
        """More tokens of a choice are here, together: a client sees one gap before them and none between them."""
        now_s = self._clock.monotonic_s()
        gap = self._instruments.inter_token_latency.labels(self._queue_class)
        gap.observe(now_s - self._last_tokens[choice])
        for _ in range(num_tokens - 1):
            gap.observe(0.0)
        self._last_tokens[choice] = now_s
        self._num_tokens += num_tokens
        self._instruments.generation_tokens.inc(num_tokens)

    def lost_worker(self, role: str) -> None:
        """A worker failed the request, which waits for others."""
        self._instruments.retries.labels(role).inc()
        self.waits_again()

    def waits_again(self) -> None:
        """The request waits for workers once more, or still: its grant may be lost before it is heard of."""
        self._stop_running()
        if self._is_waiting:
            return
        self._is_waiting = True
        self._instruments.num_requests_waiting.labels(self._queue_class).inc()

    def finished(self, reason: FinishReason | None) -> Timings:
        """The generation is complete: its timings."""
        self._reason = reason
        num_gaps = self._num_tokens - len(self._last_tokens)
        if num_gaps > 0:
            mean_gap_s = sum(last - self._first_token for last in self._last_tokens) / num_gaps
            self._instruments.time_per_output_token.labels(self._queue_class).observe(mean_gap_s)
        return Timings(
            tokenize_s=self._tokenized - self._arrived,
            queue_s=self._granted - self._admitted,
            prefill_s=self._first_token - self._granted,
            handover_s=self._has_cache - self._first_token,
            decode_s=max(0.0, max(self._last_tokens, default=self._has_cache) - self._has_cache),
            time_to_first_token_s=self._first_token - self._arrived,
            total_s=self.age_s(),
        )

    def age_s(self) -> float:
        """Seconds since the arrival."""
        return self._clock.monotonic_s() - self._arrived

    def _stop_waiting(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._instruments.num_requests_waiting.labels(self._queue_class).dec()

    def _stop_running(self) -> None:
        if self._is_running:
            self._is_running = False
            self._instruments.num_requests_running.dec()

    def _ended(self, outcome: str) -> None:
        self._stop_waiting()
        self._stop_running()
        if self._queue_class:
            self._instruments.e2e_request_latency.labels(self._queue_class).observe(self.age_s())
        self._instruments.requests.labels(outcome).inc()
