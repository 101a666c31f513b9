"""The core where blocks run short: swaps are started and ended, and every attempt ends once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.core.clock import ManualClock
from baton.core.errors import CancelledError, InternalError, ResourceExhaustedError
from baton.engine.block_pool import BlockPool
from baton.engine.executor import ScriptedExecutor
from baton.telemetry.instruments import WorkerInstruments
from baton.worker.engine_loop import EngineLoop
from baton.worker.messages import Cancel, Failed
from baton.worker.metrics import LoadMetrics
from decode_worker.engine_core import DecodeCore
from decode_worker.messages import Finished, Token
from decode_worker.movers import Rooms, SwapDone
from tests.unit.decode_worker.test_engine_core import LAYOUT, HandCopier, accept

NUM_BLOCKS = 6


class HandSwapper:
    """A swapper whose swaps end when the test says so."""

    def __init__(self) -> None:
        self.started: dict[str, bool] = {}
        self._done: list[SwapDone] = []

    def start(self, swap):
        self.started[swap.attempt_id] = swap.is_out

    def finish(self, attempt_id: str, *, succeeded: bool = True) -> bool:
        """Whether it was one out."""
        self._done.append(SwapDone(attempt_id=attempt_id, succeeded=succeeded))
        return self.started.pop(attempt_id)

    @property
    def has_done(self):
        return bool(self._done)

    def take_done(self):
        done, self._done = self._done, []
        return done


class Bench:
    def __init__(self, num_slots: int = 8) -> None:
        clock = ManualClock()
        self.copier, self.swapper = HandCopier(), HandSwapper()
        swap = BlockPool(num_slots, LAYOUT.block_size) if num_slots else None
        self.rooms = Rooms(
            pool=BlockPool(NUM_BLOCKS, LAYOUT.block_size), copy_blocks=lambda *_: None, swap=swap, swapper=self.swapper
        )
        self.core = DecodeCore(self.rooms, 8, self.copier, clock)
        self.executor = ScriptedExecutor(layout=LAYOUT, num_blocks=NUM_BLOCKS)
        self.loop = EngineLoop(self.core, self.executor, clock)
        self.registry = CollectorRegistry()
        self.metrics = LoadMetrics(WorkerInstruments(self.registry), NUM_BLOCKS)
        self.events = []

    def turn(self, *commands):
        batches = []
        self.loop.turn(list(commands), list, batches.append)
        for batch in batches:
            self.metrics.observe(batch)
            self.events += batch.events

    def run_dry(self):
        while self.core.idle_s == 0:
            self.turn()

    def join(self, *names: str, max_tokens: int = 14):
        for name in names:
            self.turn(accept(name, num_tokens=6, max_tokens=max_tokens))
            self.copier.finish(name)

    def tokens(self, name: str) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Token) and event.attempt_id == name]

    def ends(self) -> dict[str, object]:
        return {event.attempt_id: event for event in self.events if event.is_last}

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def alone(max_tokens: int = 14) -> list[int]:
    bench = Bench()
    bench.join("a", max_tokens=max_tokens)
    bench.run_dry()
    return bench.tokens("a")


def test_a_swapped_sequence_goes_on_where_it_was():
    bench = Bench()
    bench.join("a", "b")
    bench.run_dry()
    # b gave way; a went on meanwhile as far as its blocks went, and waits for those of b.
    assert bench.swapper.started == {"b": True}
    assert bench.core.idle_s is None
    assert bench.core.stats.has_work
    bench.swapper.finish("b")
    assert bench.core.idle_s == 0
    bench.run_dry()
    assert isinstance(bench.ends()["a"], Finished)
    assert bench.swapper.started == {"b": False}
    assert bench.core.idle_s is None
    bench.swapper.finish("b")
    bench.run_dry()
    assert bench.tokens("a") == bench.tokens("b") == alone()
    assert isinstance(bench.ends()["b"], Finished)
    bench.core.check_integrity()
    assert bench.value("baton_preemptions_total", how="swap") == 1
    assert bench.value("baton_preemptions_total", how="shed") == 0
    assert bench.value("baton_swapped_blocks_total", way="out") == bench.value("baton_swapped_blocks_total", way="in")
    assert bench.value("baton_num_requests_swapped") == 0


def test_without_swap_space_the_latest_is_shed_with_a_reason_to_retry():
    bench = Bench(num_slots=0)
    bench.join("a", "b")
    bench.run_dry()
    assert bench.tokens("a") == alone()
    error = bench.ends()["b"].error
    assert type(error) is ResourceExhaustedError
    assert (error.reason, error.retry_after_s) == ("OUT_OF_BLOCKS", 1.0)
    assert bench.value("baton_preemptions_total", how="shed") == 1
    bench.core.check_integrity()


def test_one_that_is_cancelled_while_it_moves_ends_with_the_copy():
    for is_out in (True, False):
        bench = Bench()
        bench.join("a", "b")
        bench.run_dry()
        if not is_out:
            bench.swapper.finish("b")
            bench.run_dry()
        assert bench.swapper.started == {"b": is_out}
        bench.turn(Cancel(attempt_id="b"), Cancel(attempt_id="b"))
        assert "b" not in bench.ends()
        bench.swapper.finish("b")
        bench.run_dry()
        assert isinstance(bench.ends()["b"].error, CancelledError)
        assert [event.attempt_id for event in bench.events if event.is_last].count("b") == 1
        assert isinstance(bench.ends()["a"], Finished)
        bench.core.check_integrity()


def test_a_copy_that_fails_ends_its_sequence_and_no_other():
    bench = Bench()
    bench.join("a", "b")
    bench.run_dry()
    bench.swapper.finish("b", succeeded=False)
    bench.run_dry()
    (error,) = [event.error for event in bench.events if isinstance(event, Failed)]
    assert isinstance(error, InternalError)
    assert bench.tokens("a") == alone()
    bench.core.check_integrity()


def test_one_that_is_away_can_be_cancelled():
    bench = Bench()
    bench.join("a", "b", max_tokens=17)
    bench.run_dry()
    bench.swapper.finish("b")
    bench.turn()
    assert bench.value("baton_num_requests_swapped") == 1
    bench.turn(Cancel(attempt_id="b"))
    assert isinstance(bench.ends()["b"].error, CancelledError)
    bench.run_dry()
    bench.core.check_integrity()
