"""Peers that run in their own environments, on the steps that the engine was measured on."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.load import RequestFailedError, run_load, warm_up
from benchmarks.report import Figure
from benchmarks.systems.catalogue import LLAMA_CPP, VLLM
from benchmarks.systems.system import CannotRunError
from benchmarks.workload import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.load import Client
    from benchmarks.systems.catalogue import Choice

ROUNDS = 3
CONTEXT_TOKENS = 128
NEW_TOKENS = 33


def pipe_peer_figures(
    ours: Sequence[Figure], prompts: Sequence[int], batches: Sequence[int], num_threads: int
) -> list[Figure]:
    """For every peer a figure a size, with our float32 figure of `ours` as `value`; why, where a peer does not run."""
    return asyncio.run(_measure(ours, prompts, batches, num_threads))


async def _measure(
    ours: Sequence[Figure], prompts: Sequence[int], batches: Sequence[int], num_threads: int
) -> list[Figure]:
    known = {figure.name: figure for figure in ours}
    names = [f"prefill_{each}_float32" for each in prompts] + [f"decode_batch_{each}_float32" for each in batches]
    figures = []
    for choice in (LLAMA_CPP, VLLM):
        note = f"{choice.name}: {choice.dtype}, {num_threads} threads, over a pipe"
        rates: list[float | None]
        try:
            rates = list(await _rates(choice, prompts, batches))
        except (CannotRunError, RequestFailedError) as error:
            rates, note = [None] * len(names), f"not runnable here: {error}"
        for name, rate in zip(names, rates, strict=True):
            base = known[name]
            figures.append(
                Figure(
                    name=f"{name}_beside_{choice.kind}",
                    value=base.value,
                    unit=base.unit,
                    n=base.n,
                    peer=choice.name,
                    peer_value=rate,
                    note=note,
                )
            )
    return figures


async def _rates(choice: Choice, prompts: Sequence[int], batches: Sequence[int]) -> list[float]:
    """Best tokens/s of each prompt's prefill and each batch's decode."""
    async with choice.start() as system:
        await warm_up(system.client)
        rates = [max([await _prefill_rate(system.client, size) for _ in range(ROUNDS)]) for size in prompts]
        return rates + [await _decode_rate(system.client, size) for size in batches]


async def _prefill_rate(client: Client, num_tokens: int) -> float:
    (sample,) = await run_load(client, uniform(num_tokens, 1, num_tokens, 1))
    if not sample.is_complete:
        raise RequestFailedError(sample.error or "incomplete")
    return num_tokens / sample.ttft_s


async def _decode_rate(client: Client, num_seqs: int) -> float:
    """From the shortest step: a step is the time between two messages while all sequences run."""
    samples = await run_load(client, uniform(num_seqs, num_seqs, CONTEXT_TOKENS, NEW_TOKENS))
    all_run_s = max(sample.token_times_s[0] for sample in samples)
    gaps = [
        later - earlier
        for sample in samples
        for earlier, later in pairwise(sample.token_times_s)
        if earlier >= all_run_s and later - earlier > 0.001
    ]
    if not gaps:
        raise RequestFailedError(next((each.error for each in samples if each.error), "no steps of the whole batch"))
    # Messages of one step arrive one after another: the median says how long a step takes, the minimum less than that.
    return num_seqs / sorted(gaps)[len(gaps) // 2]
