"""Chats alone and beside one long prompt: `python -m benchmarks.isolation [--quick]`.

Open loop: a chat arrives each interval, whatever became of the others. Two intervals are run: the stated 0.4 s, and
the shortest that Baton sustains here with the chats alone, because beyond that every system only shows its queue.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.load import LoadSummary, RequestFailedError, run_load, warm_up
from benchmarks.machine import busy_share, describe_machine
from benchmarks.random_model import copy_tokenizer, save_random_llama
from benchmarks.report import print_table, write_json
from benchmarks.systems.catalogue import BATON, BATON_INT8, MODEL, VLLM, VLLM_TUNED, Choice
from benchmarks.systems.system import CannotRunError
from benchmarks.workload import chats, long_prompt, shifted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.load import Client, Sample

OUT = Path("benchmarks/out/isolation.json")
SEED = 40
STATED_INTERVAL_S = 0.4
LONG_ANSWER_TOKENS = 16
# The long prompt is under way when the first chat comes.
HEAD_START_S = 0.5
# How much of what it can serve a system is offered: at all of it, queues grow without end.
SUSTAINED_LOAD = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of one comparison."""

    num_chats: int
    chat_answer_tokens: int
    long_tokens: int


FULL = Case(num_chats=20, chat_answer_tokens=64, long_tokens=7_600)
FULL_32K = Case(num_chats=20, chat_answer_tokens=64, long_tokens=32_768)
QUICK = Case(num_chats=6, chat_answer_tokens=16, long_tokens=2_000)


async def sustained_interval_s(choice: Choice, case: Case) -> float:
    """The time between chats at which `choice` is busy for `SUSTAINED_LOAD` of the time, but at least the stated.

    From the time that it takes for all chats when they come at once. CannotRunError, RequestFailedError.
    """
    async with choice.start() as system:
        await warm_up(system.client)
        samples = await run_load(system.client, chats(SEED, case.num_chats, 0.0, case.chat_answer_tokens))
    summary = LoadSummary.of(samples)
    if summary.num_complete == 0:
        raise RequestFailedError(samples[0].error or "nothing was complete")
    return max(STATED_INTERVAL_S, summary.wall_s / summary.num_complete / SUSTAINED_LOAD)


async def measure(choice: Choice, case: Case, interval_s: float) -> dict[str, Any]:
    """One system at one interval: long alone, chats alone, both. The JSON's entry; says why if it does not run."""
    try:
        async with choice.start() as system:
            await warm_up(system.client, num_requests=4)
            entry = {
                "interval_s": interval_s,
                "configuration": system.configuration,
                "busy_share_before": await asyncio.to_thread(busy_share),
            }
            return entry | await _compare(system.client, case, interval_s)
    except (CannotRunError, RequestFailedError) as error:
        return {"interval_s": interval_s, "not_runnable": f"not runnable here: {error}"}


async def _compare(client: Client, case: Case, interval_s: float) -> dict[str, Any]:
    talk = chats(SEED + 1, case.num_chats, interval_s, case.chat_answer_tokens)
    alone = await run_load(client, talk)
    (long_alone,) = await run_load(client, [long_prompt(SEED + 2, case.long_tokens, LONG_ANSWER_TOKENS)])
    talk = shifted(chats(SEED + 3, case.num_chats, interval_s, case.chat_answer_tokens), HEAD_START_S)
    long_beside, *beside = await run_load(client, [long_prompt(SEED + 4, case.long_tokens, LONG_ANSWER_TOKENS), *talk])
    return _entry(alone, beside, long_alone, long_beside)


def _entry(
    alone: Sequence[Sample], beside: Sequence[Sample], long_alone: Sample, long_beside: Sample
) -> dict[str, Any]:
    before, during = LoadSummary.of(alone), LoadSummary.of(beside)
    # Only chats that began before the long prompt's first token were beside its prefill.
    prefill_end_s = long_beside.token_times_s[0] if long_beside.token_times_s else 0.0
    return {
        "chat_ttft_p95_alone_s": before.ttft_p95_s,
        "chat_ttft_p95_beside_s": during.ttft_p95_s,
        "chat_ttft_p50_alone_s": before.ttft_p50_s,
        "chat_ttft_p50_beside_s": during.ttft_p50_s,
        "chat_gap_p99_alone_s": before.gap_p99_s,
        "chat_gap_p99_beside_s": during.gap_p99_s,
        "long_alone_s": long_alone.total_s if long_alone.is_complete else None,
        "long_beside_s": long_beside.total_s if long_beside.is_complete else None,
        "long_error": long_alone.error or long_beside.error,
        "num_chats_alone": before.num_complete,
        "num_chats_beside": during.num_complete,
        "num_chats_failed": before.num_failed + during.num_failed,
        "num_chats_begun_during_long_prefill": sum(each.scheduled_s < prefill_end_s for each in beside),
        "num_gaps_alone": before.num_gaps,
        "num_gaps_beside": during.num_gaps,
        "samples": {
            "chats_alone": [each.as_json() for each in alone],
            "chats_beside": [each.as_json() for each in beside],
            "long_alone": long_alone.as_json(),
            "long_beside": long_beside.as_json(),
        },
    }


def show(console: Console, title: str, entries: dict[str, dict[str, Any]]) -> None:
    """A row a system and interval."""
    rows = []
    for name, entry in entries.items():
        if "not_runnable" in entry:
            rows.append((name, *[""] * 11, entry["not_runnable"]))
            continue
        cells = [f"{entry['interval_s']:.2f}", f"{entry['busy_share_before']:.0%}"]
        for key in ("chat_ttft_p95", "chat_gap_p99", "long"):
            cells += _pair(entry[f"{key}_alone_s"], entry[f"{key}_beside_s"])
        failed = entry["num_chats_failed"]
        note = entry["long_error"] or (f"{failed} chats failed" if failed else "")
        rows.append((name, *cells, note))
    headings = ["system", "each s", "busy before", "TTFT p95 alone", "beside", "x", "gap p99 alone", "beside", "x"]
    headings += ["long alone", "beside", "x", ""]
    print_table(console, title, headings, rows)


def _pair(alone: float | None, beside: float | None) -> list[str]:
    cells = ["" if value is None else f"{value:.3f}" for value in (alone, beside)]
    return [*cells, "" if not alone or beside is None else f"{beside / alone:.2f}"]


async def run(*, quick: bool, only: Sequence[str]) -> None:
    """Measures, prints and writes."""
    console = Console()
    case = QUICK if quick else FULL
    entries: dict[str, dict[str, Any]] = {}
    content: dict[str, Any] = {"case": asdict(case), "systems": entries}
    try:
        interval_s = await sustained_interval_s(BATON, case)
    except (CannotRunError, RequestFailedError) as error:
        raise SystemExit(f"isolation: {error}") from None
    content["sustained_interval_s"] = interval_s
    content["stated_interval_s"] = STATED_INTERVAL_S
    title = f"{case.num_chats} chats beside a prompt of {case.long_tokens:,} tokens (seconds)"
    intervals = {"": interval_s}
    if not quick and interval_s > STATED_INTERVAL_S:
        intervals[" at 0.4 s"] = STATED_INTERVAL_S
    for suffix, each_s in intervals.items():
        for choice in (BATON, BATON_INT8, VLLM, VLLM_TUNED):
            if choice.kind == BATON.kind or not only or choice.kind in only:
                console.print(f"{choice.name}, a chat each {each_s:.2f} s ...", highlight=False)
                entries[choice.name + suffix] = await measure(choice, case, each_s)
                # Each as soon as it is there: the whole takes long.
                show(console, title, {choice.name + suffix: entries[choice.name + suffix]})
                write_json(OUT, {"machine": describe_machine(), **content})
    if not quick:
        content["systems_32k"] = await _beside_32k(console)
    show(console, title, entries)
    if not quick:
        show(console, f"random small model, prompt of {FULL_32K.long_tokens:,} tokens", content["systems_32k"])
    write_json(OUT, {"machine": describe_machine(), **content})
    console.print(f"written to {OUT}", highlight=False)


async def _beside_32k(console: Console) -> dict[str, dict[str, Any]]:
    """Baton on a model that has the positions; weights are random, because the times do not depend on them."""
    folder = Path(tempfile.mkdtemp(prefix="random-llama-65536-"))
    try:
        save_random_llama(folder, num_positions=65_536, hidden_size=256, num_layers=4)
        copy_tokenizer(MODEL, folder)
        choice = Choice(kind="baton", name="baton 32k", model=folder)
        console.print(f"{choice.name} ...", highlight=False)
        return {choice.name: await measure(choice, FULL_32K, STATED_INTERVAL_S)}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description="Chats alone and beside one long prompt.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter, one interval, no 32k case")
    parser.add_argument("--only", action="append", default=[], metavar="KIND", help="peers to run; default: all")
    options = parser.parse_args()
    asyncio.run(run(quick=options.quick, only=options.only))


if __name__ == "__main__":
    main()
