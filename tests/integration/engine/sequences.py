"""Drives an executor the way a scheduler does, in whatever cuts a test asks for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.generation import SamplingParams
from baton.engine.batch import BatchPlan, SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from baton.engine.executor import Executor

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Sequence:
    """One sequence with its blocks; `next_slice` cuts the next piece off."""

    name: str
    prompt: list[int]
    block_table: list[int]
    sampling: SamplingParams = GREEDY
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)

    def next_slice(self, max_tokens: int) -> SequenceSlice:
        pending = (self.prompt + self.tokens)[self.num_computed :][:max_tokens]
        end = self.num_computed + len(pending)
        return SequenceSlice(
            attempt_id=self.name,
            token_ids=pending,
            start_position=self.num_computed,
            block_table=self.block_table,
            sampling=self.sampling if end == len(self.prompt) + len(self.tokens) else None,
        )


def step(executor: Executor, work: Iterable[tuple[Sequence, int]], pause: Callable[[], None] | None = None) -> None:
    """Runs one step: for each sequence at most so many tokens."""
    pairs = [(sequence, sequence.next_slice(limit)) for sequence, limit in work]
    results = executor.execute(BatchPlan(slices=[piece for _, piece in pairs]), pause).tokens
    for (sequence, piece), token in zip(pairs, results, strict=True):
        assert (token is None) == (piece.sampling is None)
        sequence.num_computed = piece.end_position
        if token is not None:
            sequence.tokens.append(token)


def generate(executor: Executor, sequence: Sequence, count: int, chunks: Iterable[int] = (10**6,)) -> list[int]:
    """Runs one sequence alone: its prompt in `chunks` (repeated), then decode steps up to `count` tokens."""
    for limit in itertools.cycle(chunks):
        if len(sequence.tokens) == count:
            return sequence.tokens
        step(executor, [(sequence, limit)])
    raise AssertionError("chunks must not be empty")
