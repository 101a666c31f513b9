"""Prefill chunks by where they stand: `python -m benchmarks.chunks [--quick]`.

Processor time of one chunk at several start positions, with the project's kernels and by PyTorch alone, in turn on
the same weights and pool; the best of each counts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from baton.core.errors import StartupError
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.kv_pool import KVPool, torch_dtype
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.native.build import build
from baton.engine.native.chunks import ChunkKernels
from baton.engine.precision import resolve_dtype
from baton.engine.threads import use_threads
from baton.engine.weights import DecoderWeights, WeightForm
from benchmarks.machine import busy_share, describe_machine
from benchmarks.report import Figure, print_figures, write_json
from benchmarks.systems.catalogue import MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

OUT = Path("benchmarks/out/chunks.json")
BLOCK_SIZE = 16
# More than the caches hold; longer contexts see blocks several times, contents do not matter.
NUM_BLOCKS = 1024
SIZES = (64, 128, 512)
STARTS = (0, 2_000, 7_500, 30_000)


@dataclass(frozen=True, slots=True)
class ChunkBench:
    """The same model twice, `kernel` with the project's kernels, and the pool that both write to."""

    kernel: DecoderModel
    torch: DecoderModel
    pool: KVPool

    @classmethod
    def load(cls, folder: Path, num_threads: int) -> ChunkBench:
        """Reads the model. Blocks. StartupError where there is no C compiler."""
        use_threads(num_threads)
        library = build()
        if library is None:
            raise StartupError("no C compiler: there is no kernel to measure")
        config, dtype = DecoderConfig.from_folder(folder), resolve_dtype("auto", "cpu")
        weights = DecoderWeights.from_folder(folder, config, WeightForm(dtype=torch_dtype(dtype)))
        kernels = ChunkKernels(config, library, num_threads=num_threads)
        pool = KVPool(config.kv_layout(BLOCK_SIZE, dtype), NUM_BLOCKS)
        pool.tensor.normal_()
        return cls(DecoderModel(config, weights, kernels=kernels), DecoderModel(config, weights), pool)

    def measure(self, num_tokens: int, start: int, rounds: int) -> Figure:
        """One size at one position."""
        end = start + num_tokens
        piece = SequenceSlice(
            attempt_id="chunk",
            token_ids=[100 + index % 1000 for index in range(num_tokens)],
            start_position=start,
            block_table=[index % NUM_BLOCKS for index in range(-(-end // BLOCK_SIZE))],
            sampling=None,
        )
        plan = BatchPlan(slices=[piece])
        pairs = [(self._timed(self.kernel, plan), self._timed(self.torch, plan)) for _ in range(rounds)]
        ours, theirs = min(ours for ours, _ in pairs), min(theirs for _, theirs in pairs)
        return Figure(
            name=f"chunk_{num_tokens}_at_{start}",
            value=num_tokens / ours,
            unit="tokens/s",
            n=rounds,
            peer="PyTorch",
            peer_value=num_tokens / theirs,
            note="of processor time",
        )

    def _timed(self, model: DecoderModel, plan: BatchPlan) -> float:
        before_s = time.process_time()
        model.hidden(plan, self.pool)
        return time.process_time() - before_s


def measure(bench: ChunkBench, starts: Sequence[int], rounds: int) -> list[Figure]:
    """All sizes at these positions."""
    return [bench.measure(size, start, rounds) for size in SIZES for start in starts]


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description="Prefill chunks by where they stand.")
    parser.add_argument("--quick", action="store_true", help="once each, and not at 30,000")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute a step (default 1)")
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder")
    options = parser.parse_args()
    busy = busy_share()
    bench = ChunkBench.load(options.model, options.threads)
    measure(bench, (0,), 1)
    figures = measure(bench, STARTS[:-1] if options.quick else STARTS, 1 if options.quick else 3)
    console = Console()
    print_figures(console, f"chunks; cores busy with other work before: {busy:.0%}", figures)
    write_json(
        OUT,
        {
            "machine": describe_machine(),
            "busy_share_before": busy,
            "configuration": {"threads": options.threads, "quick": options.quick},
            "figures": [figure.as_json() for figure in figures],
        },
    )
    console.print(f"written to {OUT}", highlight=False)


if __name__ == "__main__":
    main()
