"""What both engine processes do before they are ready: import, configure, allocate, load, warm up, each timed and told.

Torch is imported inside `load`, so that the server processes, which need the names here, stay without it.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.errors import ServingError, StartupError
from baton.core.fingerprint import tokenizer_fingerprint, weights_fingerprint
from baton.core.manifest import verify_weights
from baton.core.model import KVLayout, ModelFingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.core.settings import EngineSettings, ModelSettings
    from baton.engine.executor import Executor
    from baton.engine.kv_pool import KVPool
    from baton.structure.compiler import StructureCompiler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a server process knows of its engine once that is ready."""

    fingerprint: ModelFingerprint
    layout: KVLayout
    num_blocks: int
    vocab_size: int
    max_context_tokens: int
    takes_structure: bool

    @property
    def capacity_tokens(self) -> int:
        """Positions in the whole pool."""
        return self.num_blocks * self.layout.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A warm engine."""

    executor: Executor
    pool: KVPool
    structures: StructureCompiler | None
    facts: EngineFacts


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Logs how long a phase of the start took."""
    start_s = time.monotonic()
    yield
    _log.info("start-up phase done", extra={"phase": name, "duration_s": round(time.monotonic() - start_s, 3)})


def load(model: ModelSettings, engine: EngineSettings, make_pool: Callable[[KVLayout, int], KVPool]) -> Loaded:
    """Imports torch, makes the pool with `make_pool(layout, num_blocks)`, loads and warms the model up. Blocks.

    Raises StartupError in one line when the folder, a setting or the memory is not as it must be.
    """
    with phase("import"):
        from baton.engine.cores import CoreShare
        from baton.engine.model_config import DecoderConfig
        from baton.engine.precision import resolve_dtype
        from baton.engine.threads import use_threads
        from baton.engine.torch_executor import TorchExecutor
        from baton.structure.compiler import StructureCompiler
    use_threads(engine.num_threads)
    with phase("configure"):
        dtype = resolve_dtype(engine.dtype, engine.device)
        layout = DecoderConfig.from_folder(model.path).kv_layout(engine.block_size, dtype)
    num_blocks = engine.kv_cache_bytes // layout.block_bytes
    if num_blocks == 0:
        raise StartupError(f"engine.kv_cache_bytes: {engine.kv_cache_bytes} is less than a block, {layout.block_bytes}")
    with phase("allocate"):
        pool = make_pool(layout, num_blocks)
    with phase("load"), ThreadPoolExecutor(1) as threads:
        # Beside the load, which reads the same pages: hashing keeps no other thread from running.
        verifying = threads.submit(verify_weights, model.path)
        fingerprint = ModelFingerprint(
            model=model.name,
            weights=weights_fingerprint(model.path),
            tokenizer=tokenizer_fingerprint(model.path),
            dtype=dtype,
        )
        cores = CoreShare.of_this_host(engine.num_threads) if engine.device == "cpu" else None
        executor = TorchExecutor.from_folder(model.path, pool=pool, device=engine.device, cores=cores)
        verifying.result()
    with phase("tokenizer"):
        structures = StructureCompiler.load(model.path, vocab_size=executor.vocab_size)
    with phase("warm-up"):
        try:
            executor.warm_up()
        except ServingError as error:
            raise StartupError(f"{model.path}: the first step failed: {error}") from error
    facts = EngineFacts(
        fingerprint=fingerprint,
        layout=layout,
        num_blocks=pool.num_blocks,
        vocab_size=executor.vocab_size,
        max_context_tokens=_max_context_tokens(model, executor.max_context_tokens),
        takes_structure=structures is not None,
    )
    return Loaded(executor=executor, pool=pool, structures=structures, facts=facts)


def _max_context_tokens(model: ModelSettings, model_limit: int) -> int:
    if model.max_context_tokens is None:
        return model_limit
    if model.max_context_tokens > model_limit:
        raise StartupError(
            f"model.max_context_tokens: {model.max_context_tokens} is more than the model's own {model_limit}"
        )
    return model.max_context_tokens
