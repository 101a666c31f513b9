"""`baton plan`: what workers will hold of a model, before anything of it is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.table import Table

from baton.core.errors import StartupError
from baton.core.workers import WorkerRole
from baton.engine.host_needs import HostNeeds
from baton.engine.memory_limit import MemoryLimit, has_device, host_memory, memory_of_rank
from baton.engine.memory_plan import MemoryPlan, WorkerNeeds, gib
from baton.engine.precision import resolve_dtype
from decode_worker.settings import DecodeWorkerSettings
from prefill_worker.settings import PrefillWorkerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from baton.worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The requests that a plan is asked about."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A prefill and a decode worker, planned for equal devices or for one that they share."""

    prefill: MemoryPlan
    decode: MemoryPlan

    @classmethod
    def load(cls, flags: Sequence[str], memory: str | None) -> Deployment:
        """From flags of both workers, the environment and the file that `--config` names; `memory` replaces what
        this machine's device has. Blocks for small files. StartupError when a setting or the model is not right.
        """
        prefill, decode = PrefillWorkerSettings.load(flags), DecodeWorkerSettings.load(flags)
        return cls(
            prefill=_plan(WorkerRole.PREFILL, prefill, memory, HostNeeds(copies_pool=prefill.handover.host_copy)),
            decode=_plan(WorkerRole.DECODE, decode, memory, HostNeeds(swap_bytes=decode.swap_bytes)),
        )

    @property
    def plans(self) -> tuple[MemoryPlan, MemoryPlan]:
        """Both."""
        return self.prefill, self.decode

    @property
    def is_shared(self) -> bool:
        """Whether both take from one memory: that of the machine, or one device's."""
        return self.prefill.needs.engine.device == self.decode.needs.engine.device

    @property
    def total_bytes(self) -> int:
        """What both take together."""
        return sum(plan.total_bytes for plan in self.plans)

    def faults(self, lengths: Lengths) -> list[str]:
        """What does not fit, requests of `lengths` included."""
        num_tokens, context_tokens = lengths.prompt_tokens + lengths.output_tokens, self.decode.needs.context_tokens
        if num_tokens > context_tokens:
            return [
                f"requests of {lengths.prompt_tokens} + {lengths.output_tokens} tokens: the context is"
                f" {context_tokens} tokens"
            ]
        faults = [f"{plan.needs.role.value} worker: {fault}" for plan in self.plans for fault in plan.faults()]
        usable_bytes = self.prefill.memory.usable_bytes
        is_too_much = sum(plan.total_bytes / plan.memory.usable_bytes for plan in self.plans) > 1
        if not faults and self.is_shared and is_too_much:
            faults.append(
                f"together: both workers take {gib(self.total_bytes)}, more than the {gib(usable_bytes)} of"
                f" {self.prefill.memory.name}; each alone fits: lower engine.kv_cache_bytes or engine.memory_fraction,"
                " or run them on two"
            )
        return faults


def show_plan(deployment: Deployment, lengths: Lengths, console: Console) -> None:
    """Prints the plan for people."""
    needs, plan = deployment.prefill.needs, deployment.prefill
    parameters = plan.parameters
    shares = ", ".join(f"{name} {_count(value)}" for name, value in asdict(parameters).items() if value)
    kind, element = needs.layout.dtype, f"{needs.layout.element_bytes}"
    if needs.engine.quantization != "none":
        kind, element = needs.engine.quantization, f"{plan.weight_bytes / parameters.total:.3f}"
    console.print(
        f"{needs.config.family}, {_count(parameters.total)} parameters ({shares})\n"
        f"weights in {kind}: {_count(parameters.total)} x {element} bytes ="
        f" {plan.weight_bytes / 1e9:.2f} GB ({gib(plan.weight_bytes)})\n"
        f"KV cache: {plan.token_bytes} bytes a token, {gib(needs.layout.block_bytes)} a block of"
        f" {needs.layout.block_size} tokens",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("", "prefill worker", "decode worker", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, *cells in _rows(deployment, lengths):
        table.add_row(name, *cells)
    console.print(table)
    for line in _verdict(deployment, lengths):
        console.print(line, highlight=False, soft_wrap=True)


def plan_as_json(deployment: Deployment, lengths: Lengths) -> str:
    """The plan for programs; sizes in bytes."""
    needs, plan = deployment.prefill.needs, deployment.prefill
    return json.dumps(
        {
            "family": needs.config.family,
            "dtype": needs.layout.dtype,
            "quantization": needs.engine.quantization,
            "parameters": asdict(plan.parameters) | {"total": plan.parameters.total},
            "kv_bytes_each_token": plan.token_bytes,
            "block_size": needs.layout.block_size,
            "prompt_tokens": lengths.prompt_tokens,
            "output_tokens": lengths.output_tokens,
            "prefill_worker": _worker_fields(deployment.prefill, lengths),
            "decode_worker": _worker_fields(deployment.decode, lengths),
            "is_shared": deployment.is_shared,
            "faults": deployment.faults(lengths),
        },
        indent=2,
    )


def _plan(role: WorkerRole, settings: WorkerSettings, memory: str | None, host: HostNeeds) -> MemoryPlan:
    engine = settings.engine
    on_cpu = engine.device == "cpu"
    if memory is None:
        if not on_cpu and not has_device(engine.device):
            raise StartupError(f"--memory: must be given, because engine.device {engine.device} is not here")
        dtype = resolve_dtype(engine.dtype, engine.device)
        limit = memory_of_rank(engine.device, engine.tensor_parallel_size)
        here = host_memory()
    else:
        # The device need not be here: whatever has so much memory multiplies bfloat16.
        wants_resolution = on_cpu or engine.dtype != "auto"
        dtype = resolve_dtype(engine.dtype, "cpu") if wants_resolution else "bfloat16"
        size = _parse_size(memory)
        limit = MemoryLimit(total_bytes=size, usable_bytes=size, name="--memory", is_host=on_cpu)
        here = None  # what the machine with that device has is not known
    return MemoryPlan.make(WorkerNeeds.read(role, settings.model, engine, dtype, host), limit, here)


def _parse_size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise StartupError(f"--memory: must be a size such as 24GiB, got {text!r}") from None


def _rows(deployment: Deployment, lengths: Lengths) -> list[tuple[str, ...]]:
    plans = deployment.plans
    copies = [gib(plan.host_copy_bytes) for plan in plans]
    return [
        ("memory", *(gib(plan.memory.usable_bytes) for plan in plans)),
        ("weights", *(gib(plan.weight_bytes) for plan in plans)),
        ("largest step", *(gib(plan.step_bytes) for plan in plans)),
        ("swap space", *(gib(plan.swap_bytes) for plan in plans)),
        ("processes", *(gib(plan.process_bytes) for plan in plans)),
        ("room for KV blocks", *(gib(max(0, plan.largest_kv_bytes)) for plan in plans)),
        ("KV pool", *(gib(max(0, plan.kv_bytes)) for plan in plans)),
        ("  blocks", *(str(plan.num_blocks) for plan in plans)),
        ("  tokens", *(str(plan.num_tokens) for plan in plans)),
        ("in all", *(gib(plan.total_bytes) for plan in plans)),
        *([("host memory, for a copy of the KV pool", *copies)] if any(plan.host_copy_bytes for plan in plans) else []),
        (
            f"requests of {lengths.prompt_tokens} + {lengths.output_tokens} tokens at a time",
            *(str(plan.max_sequences(lengths.prompt_tokens, lengths.output_tokens)) for plan in plans),
        ),
    ]


def _verdict(deployment: Deployment, lengths: Lengths) -> list[str]:
    """What does not fit; else how full it is, and which knob would give more."""
    if faults := deployment.faults(lengths):
        return [f"does not fit: {fault}" for fault in faults]
    lines = []
    if deployment.is_shared:
        memory = deployment.prefill.memory
        lines.append(f"fits: both take {gib(deployment.total_bytes)} of {gib(memory.usable_bytes)} ({memory.name})")
    else:
        lines.append("fits")
    for plan in deployment.plans:
        lines += [f"{plan.needs.role.value} worker: {hint}" for hint in _hints(plan, lengths)]
    return lines


def _hints(plan: MemoryPlan, lengths: Lengths) -> list[str]:
    hints = []
    needs = plan.needs
    if plan.num_tokens < needs.context_tokens:
        hints.append(
            f"sequences of up to {plan.num_tokens} tokens fit, the model takes {needs.context_tokens}: engine."
            f"kv_cache_bytes of {gib(needs.context_tokens * plan.token_bytes)} would hold one"
        )
    num_seqs = plan.max_sequences(lengths.prompt_tokens, lengths.output_tokens)
    if num_seqs == needs.engine.max_num_seqs:
        hints.append(f"engine.max_num_seqs {num_seqs} is what bounds its requests, not memory")
    elif plan.kv_bytes < plan.largest_kv_bytes:
        hints.append("more KV blocks (engine.kv_cache_bytes, engine.memory_fraction) would hold more requests")
    else:
        hints.append("its memory is what bounds its requests")
    return hints


def _worker_fields(plan: MemoryPlan, lengths: Lengths) -> dict[str, Any]:
    return {
        "device": plan.needs.engine.device,
        "memory_bytes": plan.memory.usable_bytes,
        "weight_bytes": plan.weight_bytes,
        "step_bytes": plan.step_bytes,
        "process_bytes": plan.process_bytes,
        "swap_bytes": plan.swap_bytes,
        "host_copy_bytes": plan.host_copy_bytes,
        "largest_kv_bytes": plan.largest_kv_bytes,
        "kv_bytes": plan.kv_bytes,
        "num_blocks": plan.num_blocks,
        "num_tokens": plan.num_tokens,
        "total_bytes": plan.total_bytes,
        "max_sequences": plan.max_sequences(lengths.prompt_tokens, lengths.output_tokens),
    }


def _count(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
