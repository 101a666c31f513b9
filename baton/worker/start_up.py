"""What both engine processes do before they are ready: import, configure, allocate, load, warm up, each timed and told.

Torch is imported inside `load`, so that the server processes, which need the names here, stay without it.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.core.errors import ServingError, StartupError
from baton.core.fingerprint import tokenizer_fingerprint, weights_fingerprint
from baton.core.manifest import verify_weights
from baton.core.model import KVLayout, ModelFingerprint
from baton.core.start_up import StartPhases
from baton.core.workers import WorkerRole
from baton.engine.config_file import read_config
from baton.telemetry.logging import setup_logging

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from contextlib import ExitStack
    from pathlib import Path

    from baton.core.settings import ModelSettings
    from baton.engine.block_moves import BlockMover
    from baton.engine.executor import Executor
    from baton.engine.host_copy import KVMemory
    from baton.engine.host_needs import HostNeeds
    from baton.engine.memory_plan import MemoryPlan
    from baton.engine.rank_hardware import RankHardware
    from baton.structure.compiler import StructureCompiler
    from baton.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

# Ranks wait for each other many times a step. One that is so late hangs; that steps may take long is no reason.
RANK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a server process knows of its engine once that is ready. `attention` names what computes it on `device`."""

    fingerprint: ModelFingerprint
    layout: KVLayout
    num_blocks: int
    vocab_size: int
    max_context_tokens: int
    takes_structure: bool
    device: str
    attention: str

    @property
    def capacity_tokens(self) -> int:
        """Positions in the whole pool."""
        return self.num_blocks * self.layout.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A warm engine. `blocks` moves blocks between the pool and its host copy, where there is one."""

    executor: Executor
    memory: KVMemory
    blocks: BlockMover | None
    structures: StructureCompiler | None
    facts: EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """What the ranks of a group, if there is one, need of their engine process.

    `watch` takes a descriptor that is readable when a rank has ended, and ends the process's wait then; `at_end` ends
    the ranks; they are on `hardware`.
    """

    watch: Callable[[int], None]
    at_end: ExitStack
    hardware: RankHardware


def load(
    role: WorkerRole,
    settings: WorkerSettings,
    make_memory: Callable[[KVLayout, int], KVMemory],
    host: RankHost,
    needed: HostNeeds,
) -> Loaded:
    """Imports torch, makes the pool with `make_memory(layout, num_blocks)`, loads and warms the model up. Blocks.

    What several ranks have mapped must be `shared`. The caller will take what is `needed` of host memory besides.
    Raises StartupError in one line when the folder, a setting or the memory is not as it must be.
    """
    model, engine = settings.model, settings.engine
    # What is wrong with the folder is told before the libraries are there, which takes seconds.
    weights, tokenizer = weights_fingerprint(model.path), tokenizer_fingerprint(model.path)
    read_config(model.path)
    verifying = _verify_meanwhile(model.path)
    phases = StartPhases()
    phases.begin("import")
    from baton.engine.memory_limit import host_memory, memory_of_rank
    from baton.engine.memory_plan import MemoryPlan, WorkerNeeds
    from baton.engine.precision import resolve_dtype
    from baton.engine.threads import use_threads
    from baton.structure.compiler import StructureCompiler

    use_threads(engine.num_threads)
    phases.begin("configure")
    dtype = resolve_dtype(engine.dtype, engine.device)
    needs = WorkerNeeds.read(role, model, engine, dtype, needed)
    memory_limit = memory_of_rank(engine.device, engine.tensor_parallel_size)
    plan = MemoryPlan.make(needs, memory_limit, host_memory())
    plan.require_fits()
    _tell(plan)
    if verifying.done():
        verifying.result()
    phases.begin("allocate")
    memory = make_memory(needs.layout, plan.num_blocks)
    phases.begin("load")
    executor, blocks = _executor(role, settings, memory, plan.num_blocks, host)
    verifying.result()
    phases.begin("tokenizer")
    structures = StructureCompiler.load(model.path, vocab_size=executor.vocab_size)
    phases.begin("warm-up")
    try:
        executor.warm_up()
    except ServingError as error:
        raise StartupError(f"{model.path}: the first step failed: {error}") from error
    phases.end()
    facts = EngineFacts(
        fingerprint=ModelFingerprint(
            model=model.name,
            weights=weights,
            tokenizer=tokenizer,
            dtype=dtype,
            quantization=engine.quantization,
        ),
        layout=needs.layout,
        num_blocks=executor.num_blocks,
        vocab_size=executor.vocab_size,
        max_context_tokens=_max_context_tokens(model, executor.max_context_tokens),
        takes_structure=structures is not None,
        device=engine.device,
        attention=executor.attention,
    )
    return Loaded(executor=executor, memory=memory, blocks=blocks, structures=structures, facts=facts)


def _verify_meanwhile(folder: Path) -> Future[None]:
    """Begins to compare the weights with their manifest, beside the imports and the load, which reads the same pages.

    Hashing keeps no other thread from running.
    """
    threads = ThreadPoolExecutor(1)
    verifying = threads.submit(verify_weights, folder)
    threads.shutdown(wait=False)  # what was submitted is done all the same
    return verifying


def _executor(
    role: WorkerRole, settings: WorkerSettings, memory: KVMemory, num_blocks: int, host: RankHost
) -> tuple[Executor, BlockMover | None]:
    """In this process alone, or with the processes of other ranks; and what moves blocks to and from the host copy."""
    from baton.engine.cores import CoreShare
    from baton.engine.group_executor import GroupExecutor
    from baton.engine.host_copy import HostCopy
    from baton.engine.rank_process import GroupSpec
    from baton.engine.torch_executor import TorchExecutor

    engine = settings.engine
    if engine.tensor_parallel_size == 1:
        assert memory.pool is not None, "one process has one pool"
        cores = CoreShare.of_this_host(engine.num_threads) if engine.device == "cpu" else None
        alone = TorchExecutor.from_folder(
            settings.model.path, pool=memory.pool, quantization=engine.quantization, cores=cores
        )
        if role is WorkerRole.DECODE and engine.device != "cpu":
            alone.record_decode(engine.max_num_seqs)
        return alone, None if memory.host is None else HostCopy(memory.pool, memory.host)
    whole = memory.outer
    assert whole.shared is not None
    spec = GroupSpec(
        size=engine.tensor_parallel_size,
        folder=settings.model.path,
        layout=whole.layout,
        num_blocks=num_blocks,
        hardware=host.hardware,
        quantization=engine.quantization,
        memory=whole.shared,
        num_host_blocks=whole.num_blocks,
        num_threads=max(1, engine.num_threads // engine.tensor_parallel_size),
        timeout_s=RANK_TIMEOUT_S,
        name=f"{role.value}_engine",
        set_up_log=partial(setup_logging, settings.telemetry),
    )
    try:
        group = GroupExecutor.start(spec, whole)
    finally:
        whole.shared.close()
    host.at_end.callback(group.close)
    for pidfd in group.pidfds:
        host.watch(pidfd)
    return group, group if host.hardware.has_own_pools else None


def _tell(plan: MemoryPlan) -> None:
    """Logs the plan, and what of it the user may not expect."""
    from baton.engine.memory_limit import available_bytes
    from baton.engine.memory_plan import gib

    _log.info(
        "memory planned",
        extra={
            "weight_bytes": plan.weight_bytes,
            "kv_bytes": plan.kv_bytes,
            "step_bytes": plan.step_bytes,
            "total_bytes": plan.total_bytes,
            "limit_bytes": plan.memory.usable_bytes,
        },
    )
    if plan.num_tokens < plan.needs.context_tokens:
        _log.warning(
            "the KV pool of %s holds %d tokens: longer sequences are refused, though the model takes %d",
            gib(plan.kv_bytes),
            plan.num_tokens,
            plan.needs.context_tokens,
        )
    if plan.memory.is_host and plan.total_bytes > (free := available_bytes()):
        _log.warning("the worker will take up to %s, and the machine has %s left now", gib(plan.total_bytes), gib(free))


def _max_context_tokens(model: ModelSettings, model_limit: int) -> int:
    if model.max_context_tokens is None:
        return model_limit
    if model.max_context_tokens > model_limit:
        raise StartupError(
            f"model.max_context_tokens: {model.max_context_tokens} is more than the model's own {model_limit}"
        )
    return model.max_context_tokens
