"""Prefill chunks by where they stand: `python -m benchmarks.chunks [--quick]`.

Processor time of one chunk at several start positions, with the project's kernels and by PyTorch alone, in turn on
the same weights and pool, and with int8 weights; then of the linear layers by themselves, with int8 weights and with
float32's, beside one plain matrix product for each layer. The best of each counts.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
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
from baton.engine.weights import DecoderWeights, WeightForm, rows_of
from benchmarks.machine import busy_share, describe_machine
from benchmarks.report import Figure, print_figures, write_json
from benchmarks.systems.catalogue import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OUT = Path("benchmarks/out/chunks.json")
BLOCK_SIZE = 16
# More than the caches hold; longer contexts see blocks several times, contents do not matter.
NUM_BLOCKS = 1024
SIZES = (16, 64, 128, 512)
STARTS = (0, 2_000, 7_500, 30_000)


@dataclass(frozen=True, slots=True)
class ChunkBench:
    """The same model several times, and the pool that all write to."""

    kernels: ChunkKernels
    kernel: DecoderModel
    int8: DecoderModel
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
        weights, quantized = (
            DecoderWeights.from_folder(folder, config, WeightForm(dtype=torch_dtype(dtype), quantization=quantization))
            for quantization in ("none", "int8")
        )
        kernels = ChunkKernels(config, library, num_threads=num_threads)
        pool = KVPool(config.kv_layout(BLOCK_SIZE, dtype), NUM_BLOCKS)
        pool.tensor.normal_()
        return cls(
            kernels=kernels,
            kernel=DecoderModel(config, weights, kernels=kernels),
            int8=DecoderModel(config, quantized, kernels=kernels),
            torch=DecoderModel(config, weights),
            pool=pool,
        )

    def measure(self, num_tokens: int, start: int, rounds: int) -> list[Figure]:
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
        models = (self.kernel, self.int8, self.torch)
        ours, int8, theirs = best_of(rounds, *(lambda model=model: model.hidden(plan, self.pool) for model in models))
        shown = Figure(
            name=f"chunk_{num_tokens}_at_{start}",
            value=num_tokens / ours,
            unit="tokens/s",
            n=rounds,
            peer="PyTorch",
            peer_value=num_tokens / theirs,
            note="of processor time",
        )
        quantized = replace(
            shown, name=f"{shown.name}_int8", value=num_tokens / int8, peer="not quantized", peer_value=shown.value
        )
        return [shown, quantized]

    def measure_linear(self, num_rows: int, rounds: int) -> Figure:
        """The linear layers of a chunk with int8 weights; its limit are plain products in float32, nothing between."""
        config = self.kernel.config
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(num_rows, config.hidden_size, generator=generator)
        mixed = torch.randn(num_rows, config.num_heads * config.head_dim, generator=generator)
        gate_up = torch.randn(num_rows, 2 * config.intermediate_size, generator=generator)
        inner = gate_up[:, : config.intermediate_size]
        layers = [
            [
                rows_of(linear.weight, slice(None), torch.float32)
                for linear in (each.qkv, each.output, each.gate_up, each.down)
            ]
            for each in self.kernel.weights.layers
        ]

        def by_kernels(weights: DecoderWeights) -> None:
            for layer in weights.layers:
                self.kernels.after_norm(layer.qkv, hidden, layer.input_norm)
                self.kernels.linear(layer.output, mixed)
                self.kernels.after_norm(layer.gate_up, hidden, layer.mlp_norm)
                self.kernels.after_gate(layer.down, gate_up)

        def plain() -> None:
            for layer in layers:
                for weight, x in zip(layer, (hidden, mixed, hidden, inner), strict=True):
                    torch.mm(x, weight.t())

        with torch.inference_mode():
            int8, wide, limit = best_of(
                rounds, lambda: by_kernels(self.int8.weights), lambda: by_kernels(self.kernel.weights), plain
            )
        return Figure(
            name=f"linear_{num_rows}_int8",
            value=num_rows / int8,
            unit="tokens/s",
            n=rounds,
            peer="not quantized",
            peer_value=num_rows / wide,
            limit=num_rows / limit,
            note="of processor time",
        )


def best_of(rounds: int, *computations: Callable[[], object]) -> list[float]:
    """Seconds of processor time of each, in turn."""
    best = [math.inf] * len(computations)
    for _ in range(rounds):
        for index, compute in enumerate(computations):
            before_s = time.process_time()
            compute()
            best[index] = min(best[index], time.process_time() - before_s)
    return best


def measure(bench: ChunkBench, starts: Sequence[int], rounds: int) -> list[Figure]:
    """All sizes at these positions, and the linear layers of all."""
    chunks = [figure for size in SIZES for start in starts for figure in bench.measure(size, start, rounds)]
    return chunks + [bench.measure_linear(size, rounds) for size in SIZES]


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
