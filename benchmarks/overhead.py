"""What a step costs outside the model's kernels, and how that grows."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

from baton.core.generation import SamplingParams, StopRule
from baton.engine.block_pool import BlockPool
from baton.engine.native.build import build
from baton.engine.native.race import NativeRace
from baton.engine.sampler import sample, torch_race
from benchmarks.engine_under_test import BLOCK_SIZE, BatonEngine
from benchmarks.limits import in_turn
from benchmarks.random_model import save_random_llama
from benchmarks.report import Figure
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence

BATCHES = (1, 4, 16, 64)
POOL_SIZES = (1, 4, 16)
CONTEXT_TOKENS = 128
SMALLEST_POOL_BLOCKS = 2048
VOCAB_SIZE = 49_152
LIMIT_S = 0.001
# By so much the same work differs from one pool to the next.
NOISE = 0.2


def overhead_figures(rounds: int) -> list[Figure]:
    """Scheduler, sampler, and the executor's own Python on a model of one tiny layer, each alone; growth."""
    loops = [_DecodeLoop(size, SMALLEST_POOL_BLOCKS) for size in BATCHES]
    pools = [_DecodeLoop(16, SMALLEST_POOL_BLOCKS * factor) for factor in POOL_SIZES]
    timed = in_turn([loop.turn for loop in loops + pools], rounds)
    figures = [
        Figure(
            name=f"scheduler_batch_{size}",
            value=times.best_s,
            unit="s",
            n=times.n,
            limit=LIMIT_S,
            goal_limit_ratio=1.0,
            note="plan and commit of a decode step; limit: 1 ms",
        )
        for size, times in zip(BATCHES, timed[: len(BATCHES)], strict=True)
    ]
    figures.append(_growth("growth_of_scheduler_batch_1_to_64", timed[0].best_s, timed[len(BATCHES) - 1].best_s, 64))
    by_pool = timed[len(BATCHES) :]
    figures.append(_growth("growth_of_scheduler_pool_1x_to_16x", by_pool[0].best_s, by_pool[-1].best_s, 1 + NOISE))
    return figures + _sampler_figures(rounds) + _executor_figures(rounds)


def _sampler_figures(rounds: int) -> list[Figure]:
    library = build()
    race = torch_race if library is None else NativeRace(library)
    greedy = SamplingParams(temperature=0.0)
    logits = torch.randn(BATCHES[-1], VOCAB_SIZE)
    works = [lambda size=size: sample(logits[:size], [greedy] * size, [1] * size, race) for size in BATCHES]
    timed = in_turn(works, rounds)
    return [
        Figure(
            name=f"sampler_batch_{size}",
            value=times.best_s,
            unit="s",
            n=times.n,
            limit=LIMIT_S,
            goal_limit_ratio=1.0,
            note=f"greedy over {VOCAB_SIZE:,} logits a row; limit: 1 ms",
        )
        for size, times in zip(BATCHES, timed, strict=True)
    ]


def _executor_figures(rounds: int) -> list[Figure]:
    folder = Path(tempfile.mkdtemp(prefix="baton-bench-"))
    try:
        save_random_llama(folder, num_positions=1024, hidden_size=64, num_layers=1, vocab_size=256)
        engines = [BatonEngine(folder, "float32", SMALLEST_POOL_BLOCKS * factor) for factor in POOL_SIZES]
    finally:
        shutil.rmtree(folder)
    smallest = engines[0]
    works = [lambda size=size: smallest.decode_step(size, CONTEXT_TOKENS) for size in BATCHES]
    works += [lambda engine=engine: engine.decode_step(16, CONTEXT_TOKENS) for engine in engines]
    timed = in_turn(works, rounds)
    figures = [
        Figure(
            name=f"executor_batch_{size}",
            value=times.best_s,
            unit="s",
            n=times.n,
            limit=LIMIT_S,
            goal_limit_ratio=1.0,
            note="one decode step of a model of one tiny layer; limit: 1 ms",
        )
        for size, times in zip(BATCHES, timed[: len(BATCHES)], strict=True)
    ]
    figures.append(_growth("growth_of_executor_batch_1_to_64", timed[0].best_s, timed[len(BATCHES) - 1].best_s, 64))
    by_pool = timed[len(BATCHES) :]
    figures.append(_growth("growth_of_executor_pool_1x_to_16x", by_pool[0].best_s, by_pool[-1].best_s, 1 + NOISE))
    return figures


def _growth(name: str, small_s: float, large_s: float, most: float) -> Figure:
    """How many times longer the large case takes; the work grows `most` times."""
    return Figure(
        name=name,
        value=large_s / small_s,
        unit="x",
        n=1,
        limit=most,
        goal_limit_ratio=1.0,
        note="limit: as the work grows" if most > 1 + NOISE else "limit: not at all, within the measurement's noise",
    )


class _DecodeLoop:
    """A decode scheduler with `num_seqs` running sequences that never end."""

    def __init__(self, num_seqs: int, num_blocks: int) -> None:
        self._scheduler = DecodeScheduler(BlockPool(num_blocks, BLOCK_SIZE), num_seqs)
        for index in range(num_seqs):
            self._scheduler.add(
                DecodeSequence(
                    attempt_id=f"attempt-{index}",
                    num_prompt_tokens=CONTEXT_TOKENS,
                    sampling=SamplingParams(temperature=0.0),
                    # As long as an equal part of the smallest pool: what is measured has to end before.
                    stop=StopRule(max_tokens=CONTEXT_TOKENS, stop_token_ids=frozenset()),
                )
            )
        for sequence in self._scheduler.take_in():
            self._scheduler.end_copy(sequence.attempt_id, join=True)
        assert self._scheduler.num_running == num_seqs

    def turn(self) -> None:
        """One step without computing anything."""
        self._scheduler.make_room()
        plan = self._scheduler.plan()
        self._scheduler.commit(plan, [1] * len(plan.slices))
