"""The engine alone, beside its peers and the machine's limits: `python -m benchmarks.engine [--quick]`.

Everything that is compared is timed in turn, in one process where that is possible, and the best time counts: a busy
machine can only make work slower. Medians are in the JSON.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from baton.engine.kv_pool import torch_dtype
from baton.engine.precision import has_bfloat16_products
from baton.engine.threads import use_threads
from benchmarks.engine_under_test import BatonEngine, TransformersModel
from benchmarks.limits import READ_BYTES, LinearLayers, MemoryRead, SquareProduct, Times, in_turn
from benchmarks.machine import busy_share, describe_machine
from benchmarks.overhead import overhead_figures
from benchmarks.pipe_peers import PeerScope, pipe_peer_figures
from benchmarks.report import Figure, print_figures, write_json
from benchmarks.starts import start_figures
from benchmarks.systems.catalogue import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

OUT = Path("benchmarks/out/engine.json")
CONTEXT_TOKENS = 128
# Room for 64 sequences of the decode measurements and for the longest prompt.
NUM_BLOCKS = 1024
# What is asked of a prompt, as part of the rate of the linear layers alone, and of a single sequence, as part of the
# rate at which the weights can be read.
PREFILL_GOALS = {("bfloat16", 512): 0.75, ("bfloat16", 2048): 0.65, ("int8", 512): 1.4, ("int8", 2048): 1.4}
SINGLE_GOALS = {"bfloat16": 0.7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much is measured."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int
    num_steps: int
    overhead_rounds: int
    peer_rounds: int


FULL = Scope(prompts=(512, 2048), batches=(1, 16), rounds=3, num_steps=16, overhead_rounds=200, peer_rounds=3)
QUICK = Scope(prompts=(512,), batches=(1, 16), rounds=1, num_steps=6, overhead_rounds=20, peer_rounds=1)


class Progress:
    """Says what is measured now, and how long the run has taken."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __call__(self, what: str) -> None:
        """Begins `what`."""
        print(f"{time.monotonic() - self._start_s:5.0f} s  {what}", flush=True)


class EngineRun:
    """Measures bfloat16 and int8 weights beside transformers; figures and all times collect here.

    transformers and the limit are in the type that this machine's PyTorch multiplies fastest: bfloat16 where the
    hardware does, else float32.
    """

    def __init__(self, folder: Path, scope: Scope, num_threads: int) -> None:
        self._scope = scope
        self._engines = {
            "bfloat16": BatonEngine(folder, "bfloat16", NUM_BLOCKS),
            "int8": BatonEngine(folder, "bfloat16", NUM_BLOCKS, quantization="int8"),
        }
        self._config = self._engines["bfloat16"].config
        self._limit_dtype = "bfloat16" if has_bfloat16_products() else "float32"
        self._transformers = TransformersModel(folder, self._limit_dtype)
        self._read = MemoryRead(num_threads)
        self.figures: list[Figure] = []
        self.times: dict[str, dict[str, float]] = {}

    def machine(self) -> None:
        """Memory and arithmetic by themselves."""
        product = SquareProduct(torch_dtype(self._limit_dtype))
        read, multiplied = in_turn([self._read, product], max(3, self._scope.rounds))
        rate = product.num_operations / multiplied.best_s / 1e9
        self.figures.append(Figure(name="memory_read", value=READ_BYTES / read.best_s / 1e9, unit="GB/s", n=read.n))
        self.figures.append(
            Figure(name=f"square_product_{self._limit_dtype}", value=rate, unit="GFLOP/s", n=multiplied.n)
        )

    def prefill(self, num_tokens: int) -> None:
        """One prompt in one step, beside its linear layers alone."""
        layers = LinearLayers(self._config, torch_dtype(self._limit_dtype), num_tokens, 1)
        works: dict[str, Callable[[], object]] = {
            name: lambda engine=engine: engine.prefill(num_tokens)  # type: ignore[misc]
            for name, engine in self._engines.items()
        }
        works |= {"transformers": lambda: self._transformers.prefill(num_tokens), "linear_layers": layers}
        times = self._time(f"prefill_{num_tokens}", works, self._scope.rounds)
        for name in self._engines:
            self.figures.append(
                Figure(
                    name=f"prefill_{num_tokens}_{name}",
                    value=num_tokens / times[name].best_s,
                    unit="tokens/s",
                    n=times[name].n,
                    peer="transformers",
                    peer_value=num_tokens / times["transformers"].best_s,
                    limit=num_tokens / times["linear_layers"].best_s,
                    goal_limit_ratio=PREFILL_GOALS.get((name, num_tokens)),
                    note=f"limit: the linear layers alone; both in {self._limit_dtype}",
                )
            )

    def decode(self, num_seqs: int) -> None:
        """A step of so many sequences: beside the time to read all weights once, or beside the linear layers."""
        layers = LinearLayers(self._config, torch_dtype(self._limit_dtype), num_seqs, num_seqs)
        works: dict[str, Callable[[], object]] = {
            name: lambda engine=engine: engine.decode_step(num_seqs, CONTEXT_TOKENS)  # type: ignore[misc]
            for name, engine in self._engines.items()
        }
        works |= {"linear_layers": layers, "memory_read": self._read}
        what = f"decode_{num_seqs}"
        times = self._time(what, works, self._scope.rounds * self._scope.num_steps)
        steps = self._transformers.decode_times_s(num_seqs, CONTEXT_TOKENS, self._scope.num_steps)
        theirs = times["transformers"] = Times(tuple(steps))
        self._keep(what, "transformers", theirs)
        for name, engine in self._engines.items():
            memory_s = engine.num_weight_bytes * times["memory_read"].best_s / READ_BYTES
            is_single = num_seqs == 1
            self.figures.append(
                Figure(
                    name=f"decode_batch_{num_seqs}_{name}",
                    value=num_seqs / times[name].best_s,
                    unit="tokens/s",
                    n=times[name].n,
                    peer="transformers",
                    peer_value=num_seqs / theirs.best_s,
                    limit=num_seqs / (memory_s if is_single else times["linear_layers"].best_s),
                    goal_limit_ratio=SINGLE_GOALS.get(name) if is_single else None,
                    note="limit: reading the weights once" if is_single else "limit: the linear layers alone",
                )
            )

    @property
    def peer_dtype(self) -> str:
        """What peers that choose no type of their own compute in."""
        return self._limit_dtype

    def _time(self, what: str, works: dict[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
        measured = dict(zip(works, in_turn(list(works.values()), rounds), strict=True))
        for name, times in measured.items():
            self._keep(what, name, times)
        return measured

    def _keep(self, what: str, name: str, times: Times) -> None:
        entry = self.times.setdefault(what, {})
        entry[f"{name}_best_s"], entry[f"{name}_median_s"] = times.best_s, times.median_s


def measure(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Everything, as the JSON's content."""
    scope = QUICK if options.quick else FULL
    use_threads(options.threads)
    progress("load the model for bfloat16, int8 and transformers")
    run = EngineRun(options.model, scope, options.threads)
    progress("memory and arithmetic")
    run.machine()
    for num_tokens in scope.prompts:
        progress(f"prefill of {num_tokens} tokens")
        run.prefill(num_tokens)
    for num_seqs in scope.batches:
        progress(f"decode steps of {num_seqs}")
        run.decode(num_seqs)
    figures = run.figures
    progress("the cost of a step outside the kernels")
    figures += overhead_figures(scope.overhead_rounds)
    if not options.no_pipe_peers:
        sizes = [(f"prefill_{each}", each) for each in scope.prompts]
        sizes += [(f"decode_batch_{each}", each) for each in scope.batches]
        figures += pipe_peer_figures(
            figures,
            sizes,
            PeerScope(num_threads=options.threads, dtype=run.peer_dtype, rounds=scope.peer_rounds),
            progress,
        )
    if not options.no_starts:
        progress("starts of the whole system")
        figures += start_figures(options.model)
    return {"figures": figures, "times": run.times}


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description="The engine alone, beside its peers and the machine's limits.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute a step (default 2)")
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder")
    parser.add_argument("--no-pipe-peers", action="store_true", help="leave out llama.cpp and vLLM")
    parser.add_argument("--no-starts", action="store_true", help="leave out how long the system takes to start")
    options = parser.parse_args()
    busy = busy_share()
    progress = Progress()
    content = measure(options, progress)
    figures: list[Figure] = content["figures"]
    progress("done")
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
