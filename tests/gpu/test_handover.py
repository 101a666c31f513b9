"""Handovers from device memory to device memory, between two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from kv_transfer.cuda_ipc import CudaIpcReader
from kv_transfer.descriptor import CudaIpcHandle, DistHandle, KVDescriptor, PeerPool, Transport
from kv_transfer.dist_reader import DistReader
from kv_transfer.errors import PeerGoneError, StaleLeaseError
from kv_transfer.segment import reap_stale_segments
from tests.gpu.source_process import BLOCK_IDS, LAYOUT, NUM_FIRST, PEER, pattern
from tests.integration.engine import families

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.core.model import KVLayout
    from kv_transfer.transport import KVReader

ROOT = Path(__file__).parents[2]
_BYTES = ("memory_handle", "ref_counter_handle", "event_handle")


class Source:
    def __init__(self, process: subprocess.Popen[str], found: dict[str, Any]) -> None:
        self.process = process
        self.found = found

    def descriptor(self, lease_id: str = "lease") -> KVDescriptor:
        return KVDescriptor(
            lease_id=lease_id,
            lease_slot=self.found["leases"][lease_id]["slot"],
            generation=self.found["leases"][lease_id]["generation"],
            worker_id=PEER.worker_id,
            incarnation=PEER.incarnation,
            address="",
            block_ids=BLOCK_IDS,
            num_tokens=len(BLOCK_IDS) * LAYOUT.block_size,
            lease_s=60.0,
        )

    def tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def reader(self, transport: Transport) -> KVReader:
        (words,) = [dict(one) for one in self.found["handles"] if one["transport"] == transport.value]
        del words["transport"]
        secret = bytes.fromhex(self.found["secret"])
        if transport is Transport.CUDA_IPC:
            handle = CudaIpcHandle(**{k: bytes.fromhex(v) if k in _BYTES else v for k, v in words.items()})
            pool = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=secret, handles=(handle,))
            return CudaIpcReader.open(pool, handle)
        sender = DistHandle(**words, transport=transport)
        pool = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=secret, handles=(sender,))
        return DistReader(pool, sender, timeout_s=20.0)


@contextmanager
def source_on(device: str) -> Iterator[Source]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.source_process", device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield Source(process, json.loads(process.stdout.readline()))
        finally:
            process.kill()
    reap_stale_segments()


def check_round_trip(source: Source, transport: Transport, device: str, layout: KVLayout) -> None:
    reader = source.reader(transport)
    into = KVPool(layout, 600, device=device)
    descriptor = source.descriptor()
    block_ids = list(range(layout.blocks_for(descriptor.num_tokens)))
    result = reader.read(descriptor, into, block_ids)
    torch.cuda.synchronize()
    by_position = pattern()[list(BLOCK_IDS)].transpose(1, 3).flatten(0, 1)
    got = into.tensor[block_ids].cpu().transpose(1, 3).flatten(0, 1)[: descriptor.num_tokens]
    assert torch.equal(got, by_position.to(got.dtype))
    assert result.transport == transport.value
    source.tell("release lease")
    with pytest.raises(StaleLeaseError):
        reader.read(descriptor, into, block_ids)
    reader.close()
    with pytest.raises(PeerGoneError):
        reader.read(descriptor, into, block_ids)


@pytest.mark.gpu(num_devices=1)
@pytest.mark.parametrize("block_size", [16, 24])
def test_cuda_ipc_on_one_device(block_size: int) -> None:
    with source_on("cuda:0") as source:
        check_round_trip(source, Transport.CUDA_IPC, "cuda:0", replace(LAYOUT, block_size=block_size))


def check_growth(source: Source, transport: Transport, device: str) -> None:
    reader, into = source.reader(transport), KVPool(LAYOUT, 600, device=device)
    growing, end = source.descriptor("growing"), len(BLOCK_IDS)
    first = growing.part(0, BLOCK_IDS[:NUM_FIRST], NUM_FIRST * LAYOUT.block_size)
    reader.read(first, into, range(NUM_FIRST))
    source.tell("grow")
    rest = growing.part(NUM_FIRST, BLOCK_IDS[NUM_FIRST:], (end - NUM_FIRST) * LAYOUT.block_size)
    reader.read(rest, into, range(NUM_FIRST, end))
    torch.cuda.synchronize()
    assert torch.equal(into.tensor[:end].cpu(), pattern()[list(BLOCK_IDS)])
    source.tell("release growing")
    with pytest.raises(StaleLeaseError):
        reader.read(rest, into, range(NUM_FIRST, end))
    reader.close()


@pytest.mark.gpu(num_devices=1)
def test_a_growing_cache_over_cuda_ipc() -> None:
    with source_on("cuda:0") as source:
        check_growth(source, Transport.CUDA_IPC, "cuda:0")


@pytest.mark.gpu(num_devices=2)
def test_a_growing_cache_over_nccl() -> None:
    with source_on("cuda:0") as source:
        check_growth(source, Transport.NCCL, "cuda:1")


@pytest.mark.gpu(num_devices=1)
def test_a_step_that_samples_nothing_has_ended_when_it_returns(tmp_path: Path) -> None:
    """What may be read of a growing cache is told then."""
    families.save_model("llama", tmp_path)
    layout = DecoderConfig.from_folder(tmp_path).kv_layout(16, "float32")
    executor = TorchExecutor.from_folder(tmp_path, pool=KVPool(layout, 8, device="cuda:0"))
    piece = SequenceSlice(
        attempt_id="a",
        token_ids=[5 + index % 16 for index in range(64)],
        start_position=0,
        block_table=[0, 1, 2, 3],
        sampling=None,
    )
    executor.execute(BatchPlan(slices=[piece]))
    assert torch.cuda.current_stream().query()


@pytest.mark.gpu(num_devices=1)
def test_a_killed_source_is_found_out_or_harmless() -> None:
    """The mapping may outlive its owner or not, as the driver has it; either way this process goes on."""
    with source_on("cuda:0") as source:
        reader = source.reader(Transport.CUDA_IPC)
        source.process.kill()
        source.process.wait()
        reader.close()
    assert torch.ones(4, device="cuda:0").sum().item() == 4


@pytest.mark.gpu(num_devices=2)
def test_cuda_ipc_between_devices() -> None:
    with source_on("cuda:0") as source:
        check_round_trip(source, Transport.CUDA_IPC, "cuda:1", LAYOUT)


@pytest.mark.gpu(num_devices=2)
@pytest.mark.parametrize("block_size", [16, 24])
def test_nccl_between_devices(block_size: int) -> None:
    with source_on("cuda:0") as source:
        check_round_trip(source, Transport.NCCL, "cuda:1", replace(LAYOUT, block_size=block_size))
