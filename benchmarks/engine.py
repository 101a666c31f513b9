"""The engine alone, beside transformers and the machine's limits: `python -m benchmarks.engine [--quick]`.

Everything that is compared is timed in turn, in one process where that is possible, and the best time counts: a busy
machine can only make work slower. Medians are in the JSON.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from baton.engine.kv_pool import torch_dtype
from baton.engine.precision import resolve_dtype
from baton.engine.threads import use_threads
from benchmarks.engine_under_test import BatonEngine, TransformersModel
from benchmarks.limits import READ_BYTES, LinearLayers, MemoryRead, SquareProduct, Times, in_turn
from benchmarks.machine import busy_share, describe_machine
from benchmarks.overhead import overhead_figures
from benchmarks.pipe_peers import pipe_peer_figures
from benchmarks.report import Figure, print_figures, write_json
from benchmarks.systems.catalogue import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

OUT = Path("benchmarks/out/engine.json")
CONTEXT_TOKENS = 128
# Room for 64 sequences of the decode measurements and for the longest prompt.
NUM_BLOCKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much is measured."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int
    num_steps: int


FULL = Scope(prompts=(512, 2048), batches=(1, 16), rounds=5, num_steps=16)
QUICK = Scope(prompts=(512,), batches=(1, 16), rounds=2, num_steps=4)


class EngineRun:
    """Measures one dtype; figures and all times collect here."""

    def __init__(self, folder: Path, dtype: str, scope: Scope) -> None:
        self._scope = scope
        self._dtype = dtype
        self._baton = BatonEngine(folder, dtype, NUM_BLOCKS)
        self._transformers = TransformersModel(folder, dtype)
        self.figures: list[Figure] = []
        self.times: dict[str, dict[str, float]] = {}

    def machine(self) -> None:
        """Memory and arithmetic by themselves."""
        product = SquareProduct(torch_dtype(self._dtype))
        read, multiplied = in_turn([MemoryRead(), product], self._scope.rounds)
        rate = product.num_operations / multiplied.best_s / 1e9
        self._add(Figure(name="memory_read", value=READ_BYTES / read.best_s / 1e9, unit="GB/s", n=read.n))
        self._add(Figure(name=f"square_product_{self._dtype}", value=rate, unit="GFLOP/s", n=multiplied.n))

    def prefill(self, num_tokens: int) -> None:
        """One prompt in one step, beside its linear layers alone."""
        config, dtype = self._baton.config, torch_dtype(self._dtype)
        layers = LinearLayers(config, dtype, num_tokens, 1)
        ours, theirs, limit = self._time(
            f"prefill_{num_tokens}",
            {
                "baton": lambda: self._baton.prefill(num_tokens),
                "transformers": lambda: self._transformers.prefill(num_tokens),
                "linear_layers": layers,
            },
        )
        self._add(
            Figure(
                name=f"prefill_{num_tokens}_{self._dtype}",
                value=num_tokens / ours.best_s,
                unit="tokens/s",
                n=ours.n,
                peer="transformers",
                peer_value=num_tokens / theirs.best_s,
                limit=num_tokens / limit.best_s,
                note="limit: the linear layers alone",
            )
        )

    def decode(self, num_seqs: int) -> None:
        """A step of so many sequences: beside the time to read all weights once, and beside the linear layers."""
        config, dtype, scope = self._baton.config, torch_dtype(self._dtype), self._scope
        layers = LinearLayers(config, dtype, num_seqs, num_seqs)
        rounds = scope.rounds * scope.num_steps
        ours, limit, read = self._time(
            f"decode_{num_seqs}",
            {
                "baton": lambda: self._baton.decode_step(num_seqs, CONTEXT_TOKENS),
                "linear_layers": layers,
                "memory_read": MemoryRead(),
            },
            rounds,
        )
        steps: list[float] = []
        for _ in range(2):
            steps += self._transformers.decode_times_s(num_seqs, CONTEXT_TOKENS, scope.num_steps)
        theirs = Times(tuple(steps))
        self._keep(f"decode_{num_seqs}", "transformers", theirs)
        memory_s = layers.num_weight_bytes * read.best_s / READ_BYTES
        by_memory = memory_s >= limit.best_s or num_seqs == 1
        self._add(
            Figure(
                name=f"decode_batch_{num_seqs}_{self._dtype}",
                value=num_seqs / ours.best_s,
                unit="tokens/s",
                n=ours.n,
                peer="transformers",
                peer_value=num_seqs / theirs.best_s,
                limit=num_seqs / (memory_s if by_memory else limit.best_s),
                note="limit: reading the weights once" if by_memory else "limit: the linear layers alone",
            )
        )
        self._add(
            Figure(
                name=f"decode_batch_{num_seqs}_{self._dtype}_linear_layers",
                value=num_seqs / limit.best_s,
                unit="tokens/s",
                n=limit.n,
                limit=num_seqs / memory_s,
                note="the linear layers alone; limit: reading the weights once",
            )
        )

    def _time(self, what: str, works: dict[str, Callable[[], object]], rounds: int | None = None) -> list[Times]:
        measured = in_turn(list(works.values()), rounds or self._scope.rounds)
        for name, times in zip(works, measured, strict=True):
            self._keep(what, name, times)
        return measured

    def _keep(self, what: str, name: str, times: Times) -> None:
        entry = self.times.setdefault(f"{what}_{self._dtype}", {})
        entry[f"{name}_best_s"], entry[f"{name}_median_s"] = times.best_s, times.median_s

    def _add(self, figure: Figure) -> None:
        self.figures.append(figure)


def measure(folder: Path, scope: Scope, num_threads: int) -> dict[str, Any]:
    """Everything, as the JSON's content."""
    use_threads(num_threads)
    dtypes = ["float32"]
    figures: list[Figure] = []
    times: dict[str, dict[str, float]] = {}
    if resolve_dtype("auto", "cpu") == "bfloat16":
        dtypes.append("bfloat16")
    for dtype in dtypes:
        run = EngineRun(folder, dtype, scope)
        run.machine()
        for num_tokens in scope.prompts:
            run.prefill(num_tokens)
        for num_seqs in scope.batches:
            run.decode(num_seqs)
        figures += run.figures
        times |= run.times
    if "bfloat16" not in dtypes:
        reason = "not measured: this processor has no bfloat16 arithmetic"
        names = [f"prefill_{each}" for each in scope.prompts] + [f"decode_batch_{each}" for each in scope.batches]
        figures += [Figure(name=f"{name}_bfloat16", value=None, unit="tokens/s", n=0, note=reason) for name in names]
    return {"figures": figures, "times": times}


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description="The engine alone, beside transformers and the machine's limits.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute a step (default 2)")
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder")
    parser.add_argument("--no-pipe-peers", action="store_true", help="leave out llama.cpp and vLLM")
    options = parser.parse_args()
    scope = QUICK if options.quick else FULL
    busy = busy_share()
    content = measure(options.model, scope, options.threads)
    figures: list[Figure] = content["figures"]
    figures += overhead_figures(rounds=20 if options.quick else 200)
    if not options.no_pipe_peers:
        figures += pipe_peer_figures(figures, scope.prompts, scope.batches, options.threads)
    console = Console()
    print_figures(console, f"engine, {options.threads} threads; cores busy with other work before: {busy:.0%}", figures)
    write_json(
        OUT,
        {
            "machine": describe_machine(),
            "busy_share_before": busy,
            "configuration": {"threads": options.threads, "quick": options.quick, "context_tokens": CONTEXT_TOKENS},
            "figures": [figure.as_json() for figure in figures],
            "times": content["times"],
        },
    )
    console.print(f"written to {OUT}", highlight=False)


if __name__ == "__main__":
    main()
