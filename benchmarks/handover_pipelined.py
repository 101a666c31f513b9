"""The handover of a long prompt while it is computed: what is left to do when the last chunk is done.

The source is a real engine that computes the prompt into its pool, chunk by chunk, on this machine's cores; the reader
hears of each chunk as a decode worker does and copies it beside the next one's computation. The two processes' times
are one clock's, for they are on one host.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from baton.engine.kv_pool import KVPool
from benchmarks.handover_reader import source_of
from benchmarks.limits import timed
from benchmarks.statistics import median

if TYPE_CHECKING:
    from pathlib import Path

    from baton.core.model import KVLayout
    from benchmarks.handover_reader import Source
    from kv_transfer.descriptor import KVDescriptor

PROMPT_TOKENS = 2048
CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """One handover, seconds: `told_s` and `ended_s` after the last chunk was computed; the rest as a read alone."""

    chunk_computed_s: float
    told_s: float
    ended_s: float
    one_chunk_s: float
    whole_s: float


def measure_pipelined(model: Path, layout: KVLayout, rounds: int) -> dict[str, Any]:
    """Each transport's handover beside the computation, and its reads of one chunk and of everything afterwards."""
    num_blocks = layout.blocks_for(PROMPT_TOKENS)
    into = KVPool(layout, num_blocks)
    with source_of(layout, num_blocks, model) as source:
        samples: dict[str, list[Handover]] = {name: [] for name in source.readers}
        for number in range(rounds + 1):
            for name in source.readers:
                handover = _hand_over(source, name, into)
                if number:  # the first one opens connections
                    samples[name].append(handover)
    results = []
    for name, handovers in samples.items():
        times = {key: median([asdict(one)[key] for one in handovers]) for key in asdict(handovers[0])}
        results.append(
            {
                "transport": name,
                **times,
                "ended_of_one_chunk": times["ended_s"] / times["one_chunk_s"],
                "ended_of_whole": times["ended_s"] / times["whole_s"],
                "n": len(handovers),
            }
        )
    return {"prompt_tokens": PROMPT_TOKENS, "chunk_tokens": CHUNK_TOKENS, "results": results}


def _hand_over(source: Source, transport: str, into: KVPool) -> Handover:
    reader = source.readers[transport]
    growing = source.compute(PROMPT_TOKENS, CHUNK_TOKENS)
    block_ids: list[int] = []
    parts: list[KVDescriptor] = []
    for growth in source.follow(growing):
        told_at_s = time.monotonic()
        first = len(block_ids)
        block_ids += growth.block_ids
        parts.append(growing.part(first, growth.block_ids, len(growth.block_ids) * into.layout.block_size))
        reader.read(parts[-1], into, range(first, len(block_ids)))
    ended_at_s = time.monotonic()
    computed = source.computed()
    whole = growing.part(0, block_ids, len(block_ids) * into.layout.block_size)
    return Handover(
        chunk_computed_s=median(list(computed.chunks_s)),
        told_s=told_at_s - computed.ended_at_s,
        ended_s=ended_at_s - computed.ended_at_s,
        one_chunk_s=timed(lambda: reader.read(parts[-1], into, range(len(parts[-1].block_ids)))),
        whole_s=timed(lambda: reader.read(whole, into, range(len(block_ids)))),
    )
