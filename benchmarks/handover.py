"""How fast KV caches change hands, beside a plain memory copy of the same bytes: `make bench-handover`.

Source and reader are processes of their own, as the workers' engines are. Every transport reads the same leases in
turn with the plain copy, so that a ratio compares what was measured within the same second.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import socket
import zlib
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import torch
from rich.console import Console

from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from baton.engine.precision import resolve_dtype
from baton.rpc.channels import client_options
from benchmarks.handover_pipelined import measure_pipelined
from benchmarks.handover_reader import source_of
from benchmarks.handover_source import MAX_MESSAGE_BYTES, RAW_METHOD
from benchmarks.limits import timed
from benchmarks.machine import describe_machine
from benchmarks.report import print_table, write_json
from benchmarks.statistics import median
from kv_transfer.block_stream import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.handover_reader import Source

OUT = Path("benchmarks/out/handover.json")
TOKENS = (128, 512, 2048, 8192, 32768)
SHUFFLED_TOKENS = 2048
SHORTEST_PREFILL_TOKENS = 128
PREFILL_TOKENS = (SHORTEST_PREFILL_TOKENS, 512, 2048, 8192)
"""The sample model takes no longer prompt."""
SMALL = "SmolLM2-135M"
# Both pools, the plain copy's two buffers and a reserve for everything else on the machine.
_COPIES, _SHARE_OF_FREE_MEMORY = 4, 0.6
_CEILING_BYTES = 128 * 2**20


def layouts() -> dict[str, KVLayout]:
    """The sample model's, in the type that this machine computes it in, and that of a larger one."""
    small = resolve_dtype("auto", "cpu")
    return {
        SMALL: KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=small),
        "8B class": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size in one layout, with its blocks in order or not."""

    layout: str
    num_tokens: int
    blocks: str
    num_bytes: int


def measure_case(
    case: Case, source: Source, into: KVPool, plain: Callable[[int], object], rounds: int
) -> list[dict[str, Any]]:
    """Each transport's figures for one case."""
    num_blocks = into.layout.blocks_for(case.num_tokens)
    ids, targets = list(range(num_blocks)), list(range(num_blocks))
    if case.blocks == "shuffled":
        random.Random(1).shuffle(ids)
        random.Random(2).shuffle(targets)
    descriptor = source.grant(ids)
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", *source.readers)}
    for number in range(rounds + 1):
        works: dict[str, Callable[[], object]] = {"memcpy": lambda: plain(case.num_bytes)}
        works |= {
            name: lambda reader=reader: reader.read(descriptor, into, targets)  # type: ignore[misc]
            for name, reader in source.readers.items()
        }
        for name, work in works.items():
            took_s = timed(work)
            if number:
                seconds[name].append(took_s)
    return [
        {
            **asdict(case),
            "transport": name,
            "median_s": median(seconds[name]),
            "gb_per_s": case.num_bytes / median(seconds[name]) / 1e9,
            "memcpy_gb_per_s": case.num_bytes / median(seconds["memcpy"]) / 1e9,
            "ratio_to_memcpy": median(
                [copy_s / took_s for copy_s, took_s in zip(seconds["memcpy"], seconds[name], strict=True)]
            ),
            "n": rounds,
        }
        for name in source.readers
    ]


def measure_ceilings(source: Source, rounds: int) -> dict[str, Any]:
    """What bounds `grpc`: gRPC with ready-made messages, loopback TCP, and the checksum that both sides make."""
    piece = bytes(PIECE_BYTES)
    num_pieces = _CEILING_BYTES // PIECE_BYTES
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(source.address, client_options(MAX_MESSAGE_BYTES)))
        stream: Any = channel.unary_stream(RAW_METHOD)
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", source.raw_port)))
        buffer = bytearray(PIECE_BYTES)

        def read_stream() -> None:
            for _ in stream(b"%d" % num_pieces):
                pass

        def read_socket() -> None:
            raw.sendall(_CEILING_BYTES.to_bytes(8, "big"))
            left = _CEILING_BYTES
            while left:
                left -= raw.recv_into(buffer, min(left, len(buffer)))

        def sum_up() -> None:
            for _ in range(num_pieces):
                zlib.crc32(piece)

        works = {"grpc_ready_made_messages": read_stream, "tcp_loopback": read_socket, "crc32": sum_up}
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for number in range(rounds + 1):
            for name, work in works.items():
                took_s = timed(work)
                if number:
                    seconds[name].append(took_s)
    return {f"{name}_gb_per_s": _CEILING_BYTES / median(samples) / 1e9 for name, samples in seconds.items()}


def measure_layout(name: str, layout: KVLayout, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """All cases of a layout that fit the memory, and the ceilings beside them."""
    budget_bytes = _SHARE_OF_FREE_MEMORY * _free_memory_bytes() / _COPIES
    sizes = [size for size in lengths if layout.blocks_for(size) * layout.block_bytes <= budget_bytes]
    num_blocks = layout.blocks_for(max(sizes))
    into = KVPool(layout, num_blocks)
    buffers = (
        torch.ones(num_blocks * layout.block_bytes, dtype=torch.uint8),
        torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8),
    )

    def plain(num_bytes: int) -> None:
        ctypes.memmove(buffers[1].data_ptr(), buffers[0].data_ptr(), num_bytes)

    results = []
    with source_of(layout, num_blocks) as source:
        for num_tokens in sizes:
            for order in ("in order", "shuffled") if num_tokens == SHUFFLED_TOKENS else ("in order",):
                num_bytes = layout.blocks_for(num_tokens) * layout.block_bytes
                case = Case(layout=name, num_tokens=num_tokens, blocks=order, num_bytes=num_bytes)
                results += measure_case(case, source, into, plain, rounds)
        ceilings = measure_ceilings(source, rounds)
    return {
        "layout": asdict(layout) | {"bytes_per_token": layout.block_bytes // layout.block_size},
        "left_out_tokens": [size for size in TOKENS if size not in sizes],
        "results": results,
        "ceilings": ceilings,
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="kept rounds of each case")
    parser.add_argument("--quick", action="store_true", help="two rounds, and prompts of up to 2,048 tokens")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/SmolLM2-135M-Instruct"))
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    lengths = [size for size in TOKENS if size <= SHUFFLED_TOKENS or not arguments.quick]
    torch.set_num_threads(1)
    console = Console()
    report: dict[str, Any] = {"machine": describe_machine()}
    for name, layout in layouts().items():
        report[name] = measure_layout(name, layout, lengths, rounds)
        rows = [
            (
                f"{result['num_tokens']:,} tokens, {result['blocks']}",
                result["transport"],
                f"{result['median_s'] * 1e3:,.2f}",
                f"{result['gb_per_s']:.2f}",
                f"{result['memcpy_gb_per_s']:.2f}",
                f"{result['ratio_to_memcpy']:.2f}",
            )
            for result in report[name]["results"]
        ]
        print_table(console, name, ("", "transport", "ms", "GB/s", "memcpy GB/s", "of memcpy"), rows)
        console.print({key: round(value, 2) for key, value in report[name]["ceilings"].items()})
    report["pipelined"] = measure_pipelined(arguments.model, layouts()[SMALL], min(3, rounds))
    _print_pipelined(console, report["pipelined"])
    report["share_of_ttft"] = _share_of_ttft(arguments.model, layouts()[SMALL].dtype, report[SMALL]["results"])
    shares = [
        (
            f"{row['num_tokens']:,} tokens",
            row["transport"],
            f"{row['prefill_s']:,.2f}",
            f"{row['copy_s'] * 1e3:,.1f}",
            f"{row['share']:.2%}",
        )
        for row in report["share_of_ttft"]
    ]
    print_table(console, "beside the prompt's computation", ("", "transport", "prefill s", "copy ms", "share"), shares)
    write_json(OUT, report)
    console.print(f"written to {OUT}")


def _print_pipelined(console: Console, pipelined: dict[str, Any]) -> None:
    rows = [
        (
            row["transport"],
            f"{row['chunk_computed_s'] * 1e3:,.0f}",
            *(f"{row[key] * 1e3:,.2f}" for key in ("told_s", "ended_s", "one_chunk_s", "whole_s")),
        )
        for row in pipelined["results"]
    ]
    title = f"{pipelined['prompt_tokens']:,} tokens while they are computed by {pipelined['chunk_tokens']}, ms"
    headings = (
        "",
        "a chunk's computation",
        "last chunk told after",
        "handover ended after",
        "one chunk",
        "all at once",
    )
    print_table(console, title, headings, rows)


def _share_of_ttft(model: Path, dtype: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each transport's copy beside the computation of the same prompt on this machine.

    The first token does not wait for the copy: it goes out when the prompt is computed. The share says how large the
    copy is beside that; who waits for it is the second token.
    """
    from benchmarks.engine_under_test import BatonEngine

    shares = []
    measured = {result["num_tokens"] for result in results}
    for num_tokens in sorted(measured.intersection(PREFILL_TOKENS)):
        engine = BatonEngine(model, dtype, num_tokens)
        engine.prefill(SHORTEST_PREFILL_TOKENS)
        prefill_s = timed(lambda: engine.prefill(num_tokens))  # noqa: B023
        shares += [
            {
                "num_tokens": num_tokens,
                "transport": result["transport"],
                "prefill_s": prefill_s,
                "copy_s": result["median_s"],
                "share": result["median_s"] / prefill_s,
            }
            for result in results
            if result["num_tokens"] == num_tokens and result["blocks"] == "in order"
        ]
    return shares


def _free_memory_bytes() -> int:
    """What can be had without swapping, caches given up."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kib * 1024


if __name__ == "__main__":
    main()
