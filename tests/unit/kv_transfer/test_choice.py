from __future__ import annotations

import pytest

from kv_transfer import choice
from kv_transfer.descriptor import CudaIpcHandle, DistHandle, GrpcHandle, ShmHandle, Transport

SHM = ShmHandle(segment="baton-x", num_blocks=4)
GLOO = DistHandle(host="h", port=1, transport=Transport.GLOO)
NCCL = DistHandle(host="h", port=1, transport=Transport.NCCL)
CUDA = CudaIpcHandle(
    device_uuid="u",
    num_blocks=4,
    fence_segment="baton-y",
    num_bytes=1,
    memory_handle=b"m",
    offset_bytes=0,
    ref_counter_handle=b"r",
    ref_counter_offset=0,
    event_handle=b"",
    needs_event_sync=False,
)
ALL = tuple(Transport)


@pytest.mark.parametrize(
    ("enabled", "device", "names"),
    [
        (ALL, "cpu", ["shm", "gloo", "grpc"]),
        (ALL, "cuda", ["cuda_ipc", "nccl", "shm", "gloo", "grpc"]),
        (ALL, "cuda:3", ["cuda_ipc", "nccl", "shm", "gloo", "grpc"]),
        ((Transport.GRPC, Transport.SHM), "cpu", ["shm", "grpc"]),
        ((Transport.CUDA_IPC,), "cpu", []),
    ],
)
def test_a_reader_offers_what_can_fill_its_memory_cheapest_first(enabled, device, names):
    assert [transport.value for transport in choice.usable(enabled, device)] == names


@pytest.mark.parametrize(
    ("handles", "device", "same_host", "expected"),
    [
        ((GrpcHandle(), SHM), "cpu", True, (SHM, GrpcHandle())),
        ((GrpcHandle(), SHM), "cpu", False, (GrpcHandle(),)),
        ((GrpcHandle(), GLOO, SHM), "cpu", True, (SHM, GLOO, GrpcHandle())),
        ((GrpcHandle(), GLOO, SHM), "cpu", False, (GLOO, GrpcHandle())),
        ((NCCL, CUDA), "cuda", True, (CUDA, NCCL)),
        ((NCCL, CUDA), "cuda", False, (NCCL,)),
        ((NCCL, CUDA), "cpu", True, ()),
        ((SHM, GrpcHandle()), "cuda", True, (SHM, GrpcHandle())),
        ((SHM, GrpcHandle()), "cuda", False, (GrpcHandle(),)),
        ((CUDA, SHM, GLOO, GrpcHandle()), "cuda", True, (CUDA, SHM, GLOO, GrpcHandle())),
        ((CUDA, SHM, GLOO, GrpcHandle()), "cuda", False, (GLOO, GrpcHandle())),
        ((CUDA, SHM, NCCL, GrpcHandle()), "cpu", True, (SHM, GrpcHandle())),
        ((SHM,), "cpu", False, ()),
    ],
)
def test_the_source_answers_with_what_both_have_by_host_and_device(handles, device, same_host, expected):
    assert choice.common_handles(handles, choice.usable(ALL, device), same_host=same_host) == expected


def test_the_readers_order_counts():
    assert (
        choice.common_handles((SHM, GrpcHandle()), (Transport.GRPC, Transport.SHM), same_host=True)[0] == GrpcHandle()
    )
