"""A step that the memory does not suffice for, with a real executor under a real limit of its process."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.core.clock import SystemClock
from baton.core.errors import OutOfMemoryError
from baton.core.generation import SamplingParams, StopRule
from baton.engine.block_pool import BlockPool
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from baton.worker.engine_loop import EngineLoop
from baton.worker.messages import Cancel, Failed
from kv_transfer.lease import LeaseTable
from prefill_worker.engine_core import PrefillCore
from prefill_worker.messages import PromptDone, Submit
from prefill_worker.scheduler import PrefillLimits, PrefillScheduler

NUM_BLOCKS = 300
LONG = 3000
# The long prompt's MLP needs over 100 MB at a time, the short ones' a few.
SPARE_BYTES = 64 << 20


class Fences:
    num_slots = 8

    def store(self, slot: int, word: int) -> None:
        pass


class Engine:
    """A prefill engine, turned by hand."""

    def __init__(self, folder: Path) -> None:
        layout = DecoderConfig.from_folder(folder).kv_layout(16, "float32")
        executor = TorchExecutor.from_folder(folder, pool=KVPool(layout, NUM_BLOCKS))
        executor.warm_up()
        limits = PrefillLimits(max_num_batched_tokens=2 * LONG, max_num_seqs=8, oldest_share=1.0)
        self.blocks = BlockPool(NUM_BLOCKS, 16)
        leases = LeaseTable(Fences(), SystemClock(), lease_s=60.0)
        self.core = PrefillCore(PrefillScheduler(self.blocks, limits), leases, SystemClock())
        self.loop = EngineLoop(self.core, executor, SystemClock())

    def run(self, prompts: dict[str, list[int]]) -> dict[str, int | Exception]:
        """The first token of each prompt, or what became of it; all are computed in one step if they can be."""
        commands = [
            Submit(
                attempt_id=name,
                lease_id=f"lease-{name}",
                token_ids=prompt,
                sampling=SamplingParams(temperature=0.0),
                stop=StopRule(max_tokens=5, stop_token_ids=frozenset()),
            )
            for name, prompt in prompts.items()
        ]
        ends: dict[str, int | Exception] = {}
        while len(ends) < len(prompts):
            batches = []
            self.loop.turn(commands, list, batches.append)
            for event in (event for batch in batches for event in batch.events):
                if isinstance(event, PromptDone):
                    ends[event.attempt_id] = event.first_tokens[0].token_id
                elif isinstance(event, Failed):
                    ends[event.attempt_id] = event.error
            commands = []
        self.loop.turn([Cancel(attempt_id=name) for name in prompts], list, batches.append)
        return ends


def child(folder: Path, connection) -> None:
    torch.set_num_threads(1)
    engine = Engine(folder)
    short = {f"short-{i}": list(range(i, i + 40)) for i in range(3)}
    free = engine.run(short)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    tight = engine.run(short | {"long": [7] * LONG})
    alone = engine.run({"long": [7] * LONG})
    again = engine.run(short)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    roomy = engine.run({"long": [7] * LONG})
    engine.blocks.check_integrity()
    connection.send((free, tight, alone, again, roomy, engine.blocks.num_used))


def test_one_request_is_shed_and_the_worker_lives_on(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).eval().save_pretrained(tmp_path)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    free, tight, alone, again, roomy, num_used = ours.recv()
    process.join()
    assert all(isinstance(token, int) for token in free.values())
    shed = tight.pop("long")
    assert isinstance(shed, OutOfMemoryError)
    assert shed.retry_after_s == 1.0
    assert tight == free
    assert isinstance(alone["long"], OutOfMemoryError)
    assert alone["long"].retry_after_s is None
    assert again == free
    assert isinstance(roomy["long"], int)
    assert num_used == 0
