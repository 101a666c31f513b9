"""Decode steps by CUDA graphs: the tokens of steps without, in less time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from baton.core.generation import SamplingParams
from tests.gpu.models import NUM_BLOCKS, executor_on_cuda, save_model
from tests.integration.engine.sequences import GREEDY, Sequence, step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from baton.engine.torch_executor import TorchExecutor

# The kernels may have to be compiled first.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

NUM_STEPS = 64
# Who is in each step, again and again: joining, leaving, in other places.
COMPANIES = [(0,), (0, 1), (2, 0, 1), (0, 1, 2, 3), (3, 2, 1, 0, 4), (4, 1)]


def work(num_sequences: int, samplings: tuple[SamplingParams, ...]) -> list[Sequence]:
    return [
        Sequence(
            str(i),
            [(7 * i + 3 * position) % 211 for position in range(64 + i)],
            list(range(i * 20, i * 20 + 20)),
            samplings[i % len(samplings)],
        )
        for i in range(num_sequences)
    ]


def graphed(folder: Path, max_rows: int) -> TorchExecutor:
    executor = executor_on_cuda(folder)
    executor.record_decode(max_rows)
    executor.warm_up()
    assert executor.num_blocks == NUM_BLOCKS - 1
    return executor


def test_graphs_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    save_model(tmp_path, num_layers=4)
    outputs = []
    for executor in (executor_on_cuda(tmp_path), graphed(tmp_path, 5)):
        sequences = work(5, (GREEDY, SamplingParams(seed=5)))
        step(executor, [(sequence, 1000) for sequence in sequences])
        for turn in range(NUM_STEPS):
            step(executor, [(sequences[i], 1) for i in COMPANIES[turn % len(COMPANIES)]])
        outputs.append([sequence.tokens for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert executor._graphs is not None, "the graphs could not be recorded"


@pytest.mark.parametrize("num_sequences", [1, 16, 48])
def test_what_a_step_costs_with_and_without(
    num_sequences: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip("flashinfer")
    save_model(tmp_path, num_layers=24)
    step_s = {}
    for name, executor in (("eager", executor_on_cuda(tmp_path)), ("graphs", graphed(tmp_path, 48))):
        executor.warm_up()
        sequences = work(num_sequences, (GREEDY,))
        for sequence in sequences:
            step(executor, [(sequence, 1000)])
        step(executor, [(sequence, 1) for sequence in sequences])
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            step(executor, [(sequence, 1) for sequence in sequences])
        step_s[name] = (time.perf_counter() - began_s) / NUM_STEPS
        figure = f"{num_sequences / step_s[name]:.0f} tokens/s, {1e3 * step_s[name]:.2f} ms a step"
        record_property(f"{num_sequences} rows, {name}", figure)
    assert step_s["graphs"] < step_s["eager"]
