"""Peers that run in their own environments, on the steps that the engine was measured on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.load import RequestFailedError, run_load, warm_up
from benchmarks.report import Figure
from benchmarks.systems.catalogue import LLAMA_CPP, VLLM
from benchmarks.systems.system import CannotRunError
from benchmarks.workload import uniform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.load import Client
    from benchmarks.systems.catalogue import Choice

CONTEXT_TOKENS = 128
NEW_TOKENS = 33
KINDS = ("bfloat16", "int8")
# How many times a peer's rate is asked of us: (peer, figure).
GOALS = {
    ("llama_cpp", "decode_batch_1_int8"): 1.3,
    ("vllm", "decode_batch_16_bfloat16"): 1.5,
    ("vllm", "decode_batch_16_int8"): 2.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerScope:
    """How peers run: `dtype` is for those that take one; each measurement is repeated `rounds` times."""

    num_threads: int
    dtype: str
    rounds: int


def pipe_peer_figures(
    ours: Sequence[Figure], sizes: Sequence[tuple[str, int]], scope: PeerScope, progress: Callable[[str], None]
) -> list[Figure]:
    """For every peer two figures a size, with ours in bfloat16 and int8 as `value`; why, where a peer does not run.

    `sizes` are the beginnings of our figures' names, `prefill` or `decode`, with the number of tokens or sequences.
    """
    return asyncio.run(_measure(ours, sizes, scope, progress))


async def _measure(
    ours: Sequence[Figure], sizes: Sequence[tuple[str, int]], scope: PeerScope, progress: Callable[[str], None]
) -> list[Figure]:
    known = {figure.name: figure for figure in ours}
    figures = []
    for choice in (LLAMA_CPP, replace(VLLM, dtype=scope.dtype)):
        progress(f"{choice.name} as a peer")
        chosen = replace(choice, num_threads=scope.num_threads)
        note = f"{choice.name}: {choice.dtype}, {scope.num_threads} threads, over a pipe"
        rates: list[float | None]
        try:
            rates = list(await _rates(chosen, sizes, scope.rounds))
        except (CannotRunError, RequestFailedError) as error:
            rates, note = [None] * len(sizes), f"not runnable here: {error}"
        for (size, _), rate in zip(sizes, rates, strict=True):
            for name in (f"{size}_{kind}" for kind in KINDS):
                figure = Figure(
                    name=f"{name}_beside_{choice.kind}",
                    value=known[name].value,
                    unit=known[name].unit,
                    n=known[name].n,
                    peer=choice.name,
                    peer_value=rate,
                    goal_ratio=GOALS.get((choice.kind, name)),
                    note=note,
                )
                figures.append(figure)
    return figures


async def _rates(choice: Choice, sizes: Sequence[tuple[str, int]], rounds: int) -> list[float]:
    """Best tokens/s of each size."""
    async with choice.start() as system:
        await warm_up(system.client)
        rates = []
        for name, size in sizes:
            measure = _prefill_rate if name.startswith("prefill") else _decode_rate
            rates.append(max([await measure(system.client, size) for _ in range(rounds)]))
        return rates


async def _prefill_rate(client: Client, num_tokens: int) -> float:
    (sample,) = await run_load(client, uniform(num_tokens, 1, num_tokens, 1))
    if not sample.is_complete:
        raise RequestFailedError(sample.error or "incomplete")
    return num_tokens / sample.ttft_s


async def _decode_rate(client: Client, num_seqs: int) -> float:
    """From the shortest step: a step is the time between two messages while all sequences run."""
    samples = await run_load(client, uniform(num_seqs, num_seqs, CONTEXT_TOKENS, NEW_TOKENS))
    if error := next((each.error for each in samples if each.error), None):
        raise RequestFailedError(error)
    all_run_s = max(sample.token_times_s[0] for sample in samples)
    gaps = [
        later - earlier
        for sample in samples
        for earlier, later in pairwise(sample.token_times_s)
        if earlier >= all_run_s and later - earlier > 0.001
    ]
    if not gaps:
        raise RequestFailedError("no steps of the whole batch")
    # Messages of one step arrive one after another: the median says how long a step takes, the minimum less than that.
    return num_seqs / sorted(gaps)[len(gaps) // 2]
