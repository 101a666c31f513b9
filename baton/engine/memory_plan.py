"""What a worker will hold, known before anything is loaded, and how large its KV pool may be.

One rule: `engine.kv_cache_bytes` wins where it is set. Else the worker as a whole takes `engine.memory_fraction` of
its memory, and the pool gets what weights, a step and the processes leave of that. Without either the fraction is
0.4, so that a prefill and a decode worker fit beside each other, and on a CPU the pool is 1 GiB at most: the machine is
not this worker's alone, and a pool in shared memory is taken in full at the start.

Several ranks on CUDA have a device each, and about an equal part of everything. The plan is that of all of them
together, in so many times the memory of the first one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.core.errors import StartupError
from baton.core.workers import WorkerRole
from baton.engine.model_config import DecoderConfig
from baton.engine.native.build import compiler
from baton.engine.precision import require_quantization
from baton.engine.rank_hardware import require_whole_host
from baton.engine.sharding import Shard
from baton.engine.sizing import StepShape, count_parameters, step_bytes, weight_bytes

if TYPE_CHECKING:
    from baton.core.model import KVLayout
    from baton.core.settings import EngineSettings, ModelSettings
    from baton.engine.host_needs import HostNeeds
    from baton.engine.memory_limit import MemoryLimit
    from baton.engine.sizing import Parameters, StepBytes

DEFAULT_FRACTION = 0.4
DEFAULT_HOST_POOL_BYTES = 1 << 30
# Rows of a prompt whose log-probabilities are computed at a time.
SCORED_ROWS = 64
# Both processes of a worker before the model: interpreters, PyTorch, the other libraries, their threads' heaps.
HOST_PROCESS_BYTES = 512 << 20
# Each further rank of a tensor-parallel worker: an interpreter with PyTorch.
RANK_PROCESS_BYTES = 384 << 20
# What CUDA keeps for a context and its libraries, and what attention and recorded decode steps keep.
DEVICE_PROCESS_BYTES = 1280 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeeds:
    """What decides over a worker's memory."""

    role: WorkerRole
    config: DecoderConfig
    layout: KVLayout
    engine: EngineSettings
    max_context_tokens: int | None
    by_kernels: bool
    host: HostNeeds

    @classmethod
    def read(
        cls, role: WorkerRole, model: ModelSettings, engine: EngineSettings, dtype: str, host: HostNeeds
    ) -> WorkerNeeds:
        """Those of a worker of these settings. Blocks for a small file. StartupError: it can't serve the model."""
        require_whole_host(engine.tensor_parallel_size, engine.device)
        config = DecoderConfig.from_folder(model.path)
        require_quantization(engine.quantization, engine.device, config.stored_quantization)
        return cls(
            role=role,
            config=config,
            layout=config.kv_layout(engine.block_size, dtype),
            engine=engine,
            max_context_tokens=model.max_context_tokens,
            by_kernels=engine.device == "cpu" and compiler() is not None,
            host=host,
        )

    @property
    def context_tokens(self) -> int:
        """The longest sequence that the model or the setting allows."""
        return self.config.max_positions if self.max_context_tokens is None else self.max_context_tokens

    @property
    def on_cpu(self) -> bool:
        """Whether all of it is host memory."""
        return self.engine.device == "cpu"

    @property
    def has_host_copy(self) -> bool:
        """Whether a pool in device memory is copied in host memory."""
        return not self.on_cpu and (self.host.copies_pool or self.engine.tensor_parallel_size > 1)

    def devices_worth(self) -> float:
        """How many times its memory a device may count: less than there are ranks where their parts are uneven."""
        num_ranks, num_heads = self.engine.tensor_parallel_size, self.config.num_kv_heads
        return 1 if self.on_cpu else num_heads / max(cut.count for cut in Shard(0, num_ranks).cuts(num_heads))

    def process_bytes(self) -> int:
        """What the worker's processes take before the model."""
        if not self.on_cpu:
            return DEVICE_PROCESS_BYTES * self.engine.tensor_parallel_size
        return HOST_PROCESS_BYTES + (self.engine.tensor_parallel_size - 1) * RANK_PROCESS_BYTES

    def largest_step(self) -> StepBytes:
        """What the largest step takes, by all ranks together."""
        is_decode = self.role is WorkerRole.DECODE
        num_seqs, num_tokens = self.engine.max_num_seqs, self.engine.max_num_batched_tokens
        num_ranks = self.engine.tensor_parallel_size
        # On a CPU another step may run in the pauses of a prefill step, unless several ranks compute it.
        num_steps = 2 if self.on_cpu and not is_decode and num_ranks == 1 else 1
        step = StepShape(
            num_tokens=num_seqs if is_decode else num_tokens * num_steps,
            num_sampled=min(num_seqs, num_tokens),
            num_scored=0 if is_decode else SCORED_ROWS,
            num_keys=self.context_tokens * (num_seqs if is_decode else num_steps),
            # Several ranks compute such rows as they do chunks: by the attention kernel, if there is one.
            is_decode=is_decode and not (num_ranks > 1 and self.by_kernels),
            by_kernels=self.by_kernels,
            is_quantized=self.engine.quantization != "none",
        )
        # The last rank's part is the largest.
        part = self.config.part(Shard(num_ranks - 1, num_ranks))
        return step_bytes(part, self.layout, step, on_cpu=self.on_cpu).times(num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a worker will hold, in bytes. `kv_bytes` is what the rule gives: it may be less than a block, or below 0.

    `memory` is all that there is for it; `host_memory` the machine's or container's beside devices, None if not known.
    """

    needs: WorkerNeeds
    memory: MemoryLimit
    host_memory: MemoryLimit | None
    parameters: Parameters
    weight_bytes: int
    process_bytes: int
    step: StepBytes
    kv_bytes: int

    @classmethod
    def make(cls, needs: WorkerNeeds, memory: MemoryLimit, host_memory: MemoryLimit | None = None) -> MemoryPlan:
        """Computes the plan; see the module for the rule. `memory` is that of one device, or of the machine."""
        parameters = count_parameters(needs.config)
        plan = cls(
            needs=needs,
            memory=memory.times(needs.devices_worth()),
            host_memory=host_memory,
            parameters=parameters,
            weight_bytes=weight_bytes(
                needs.config, element_bytes=needs.layout.element_bytes, quantization=needs.engine.quantization
            ),
            process_bytes=needs.process_bytes(),
            step=needs.largest_step(),
            kv_bytes=0,
        )
        return replace(plan, kv_bytes=plan._chosen_kv_bytes())

    @property
    def num_blocks(self) -> int:
        """Whole blocks in the pool."""
        return max(0, self.kv_bytes // self.needs.layout.block_bytes)

    @property
    def num_tokens(self) -> int:
        """Positions in the pool."""
        return self.num_blocks * self.needs.layout.block_size

    @property
    def token_bytes(self) -> int:
        """KV cache of one position."""
        return self.needs.layout.block_bytes // self.needs.layout.block_size

    @property
    def step_bytes(self) -> int:
        """What the largest step allocates."""
        return self.step.with_cache(self.num_tokens)

    @property
    def swap_bytes(self) -> int:
        """Swap space that lies in the same memory as the rest."""
        return self.needs.host.swap_bytes if self.needs.on_cpu else 0

    @property
    def host_copy_bytes(self) -> int:
        """The copy of the pool in host memory, which is beside the rest."""
        return self.num_blocks * self.needs.layout.block_bytes if self.needs.has_host_copy else 0

    @property
    def total_bytes(self) -> int:
        """All of it, with whole blocks."""
        pool_bytes = self.num_blocks * self.needs.layout.block_bytes
        return self.weight_bytes + self.process_bytes + self.swap_bytes + self.step_bytes + pool_bytes

    @property
    def largest_kv_bytes(self) -> int:
        """The largest pool that the whole memory would leave room for; below 0 when the rest does not fit already."""
        return self._pool_of(self.memory.usable_bytes)

    def max_sequences(self, prompt_tokens: int, output_tokens: int) -> int:
        """How many such sequences the worker holds at a time."""
        output = output_tokens if self.needs.role is WorkerRole.DECODE else 0
        by_blocks = self.num_blocks // self.needs.layout.blocks_for(prompt_tokens + output)
        return min(by_blocks, self.needs.engine.max_num_seqs)

    def faults(self) -> list[str]:
        """What keeps the worker from starting, a line each that names fields and numbers; empty when all fits."""
        if self.largest_kv_bytes < self.needs.layout.block_bytes:
            return [
                f"model.path: {self._rest()} leave no room for KV blocks in the {gib(self.memory.usable_bytes)} of"
                f" {self.memory.name}: {self._smaller()}"
            ]
        if self.num_blocks == 0:
            return [self._no_block()]
        if self.total_bytes > self.memory.usable_bytes:
            return [
                f"{self._field}: {gib(self.kv_bytes)} of KV blocks and {self._rest()} are more than the"
                f" {gib(self.memory.usable_bytes)} of {self.memory.name}: at most {gib(self.largest_kv_bytes)} of KV"
                " blocks fit"
            ]
        if (host := self.host_memory) is not None and self._beside_bytes > host.usable_bytes:
            most_bytes = host.usable_bytes - self._beside_bytes + self.host_copy_bytes
            return [
                f"{self._field}: the host copy of {gib(self.kv_bytes)} of KV blocks and"
                f" {gib(self._beside_bytes - self.host_copy_bytes)} for swap space and processes are more than the"
                f" {gib(host.usable_bytes)} of {host.name}: at most {gib(most_bytes)} of KV blocks fit there"
            ]
        wanted = self.needs.max_context_tokens
        if wanted is not None and wanted > self.num_tokens:
            return [
                f"model.max_context_tokens: a sequence of {wanted} tokens needs {gib(wanted * self.token_bytes)} of KV"
                f" blocks, the pool has {gib(self.kv_bytes)} for {self.num_tokens} tokens: raise {self._field} or lower"
                " model.max_context_tokens"
            ]
        return []

    def require_fits(self) -> None:
        """Raises StartupError with what `faults` says."""
        if faults := self.faults():
            raise StartupError("; ".join(faults))

    @property
    def _beside_bytes(self) -> int:
        """What a worker with a host copy takes of host memory beside its devices'; 0 for others."""
        if not self.needs.has_host_copy:
            return 0
        process_bytes = HOST_PROCESS_BYTES + (self.needs.engine.tensor_parallel_size - 1) * RANK_PROCESS_BYTES
        return self.host_copy_bytes + self.needs.host.swap_bytes + process_bytes

    @property
    def _field(self) -> str:
        """The setting that decided over the pool's size."""
        engine = self.needs.engine
        is_fraction = engine.kv_cache_bytes is None and engine.memory_fraction is not None
        return "engine.memory_fraction" if is_fraction else "engine.kv_cache_bytes"

    def _rest(self) -> str:
        parts = [f"{gib(self.weight_bytes)} of weights", f"{gib(self.step_bytes)} for a step"]
        parts += [f"{gib(self.swap_bytes)} of swap space"] if self.swap_bytes else []
        return ", ".join(parts) + f" and {gib(self.process_bytes)} for the processes"

    def _no_block(self) -> str:
        block = gib(self.needs.layout.block_bytes)
        engine = self.needs.engine
        if engine.kv_cache_bytes is not None:
            return f"engine.kv_cache_bytes: {gib(engine.kv_cache_bytes)} is less than a block, {block}"
        fraction = DEFAULT_FRACTION if engine.memory_fraction is None else engine.memory_fraction
        share = int(fraction * self.memory.total_bytes)
        return (
            f"engine.memory_fraction: {fraction:g} of {gib(self.memory.total_bytes)} ({self.memory.name}) is"
            f" {gib(share)}, and {self._rest()} leave no KV block of {block}: raise it or set engine.kv_cache_bytes,"
            f" of which {gib(self.largest_kv_bytes)} fit"
        )

    def _smaller(self) -> str:
        help_ = [] if self.needs.layout.element_bytes == 2 else ["engine.dtype bfloat16 halves the weights"]
        help_.append("a lower engine.max_num_batched_tokens or engine.max_num_seqs makes steps smaller")
        return "; ".join(help_)

    def _chosen_kv_bytes(self) -> int:
        engine = self.needs.engine
        if engine.kv_cache_bytes is not None:
            return int(engine.kv_cache_bytes)
        fraction = DEFAULT_FRACTION if engine.memory_fraction is None else engine.memory_fraction
        chosen = self._pool_of(int(fraction * self.memory.total_bytes))
        if engine.memory_fraction is None and self.memory.is_host:
            return min(chosen, DEFAULT_HOST_POOL_BYTES)
        return chosen

    def _pool_of(self, budget_bytes: int) -> int:
        """The pool that leaves room for the rest within a budget."""
        left = budget_bytes - self.weight_bytes - self.process_bytes - self.swap_bytes
        return self.step.most_cache(left, self.token_bytes)


def gib(num_bytes: int) -> str:
    """Bytes for people: whole KiB or MiB below a GiB, else two digits after the point."""
    if abs(num_bytes) >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    if abs(num_bytes) >= 1 << 20:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 10):.0f} KiB"
