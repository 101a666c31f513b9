"""Between plain data and the messages of `baton.v1`. Only here are wire values checked for form.

Each reading function raises InvalidArgumentError that names the field.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from baton.core.errors import InvalidArgumentError
from baton.core.fingerprint import is_fingerprint
from baton.core.model import KVLayout, ModelFingerprint
from baton.v1 import common_pb2, kv_transfer_pb2
from kv_transfer.block_stream import Part
from kv_transfer.descriptor import (
    CudaIpcHandle,
    DistHandle,
    Growth,
    GrpcHandle,
    KVDescriptor,
    PeerKey,
    PeerPool,
    PoolHandle,
    ShmHandle,
    Transport,
)
from kv_transfer.handshake import Endpoint
from kv_transfer.lease import LeaseOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_DTYPES = ("float32", "bfloat16", "float16")

_OUTCOMES: Mapping[LeaseOutcome, kv_transfer_pb2.LeaseOutcome.ValueType] = {
    LeaseOutcome.CONSUMED: kv_transfer_pb2.LEASE_OUTCOME_CONSUMED,
    LeaseOutcome.ABANDONED: kv_transfer_pb2.LEASE_OUTCOME_ABANDONED,
    LeaseOutcome.EXPIRED: kv_transfer_pb2.LEASE_OUTCOME_EXPIRED,
}

_TRANSPORTS: Mapping[Transport, kv_transfer_pb2.Transport.ValueType] = {
    Transport.CUDA_IPC: kv_transfer_pb2.TRANSPORT_CUDA_IPC,
    Transport.SHM: kv_transfer_pb2.TRANSPORT_SHM,
    Transport.NCCL: kv_transfer_pb2.TRANSPORT_NCCL,
    Transport.GLOO: kv_transfer_pb2.TRANSPORT_GLOO,
    Transport.GRPC: kv_transfer_pb2.TRANSPORT_GRPC,
}


def outcome_to_proto(outcome: LeaseOutcome) -> kv_transfer_pb2.LeaseOutcome.ValueType:
    """The enum's wire value."""
    return _OUTCOMES[outcome]


def outcome_from_reader(value: int) -> LeaseOutcome:
    """A reader's word on how its lease ended: whatever is not CONSUMED is taken for ABANDONED."""
    consumed = value == kv_transfer_pb2.LEASE_OUTCOME_CONSUMED
    return LeaseOutcome.CONSUMED if consumed else LeaseOutcome.ABANDONED


def descriptor_to_proto(descriptor: KVDescriptor) -> kv_transfer_pb2.KvDescriptor:
    """The descriptor's message."""
    return kv_transfer_pb2.KvDescriptor(
        lease_id=descriptor.lease_id,
        lease_slot=descriptor.lease_slot,
        generation=descriptor.generation,
        worker_id=descriptor.worker_id,
        incarnation=descriptor.incarnation,
        address=descriptor.address,
        block_ids=descriptor.block_ids,
        num_tokens=descriptor.num_tokens,
        lease_s=descriptor.lease_s,
        is_growing=descriptor.is_growing,
    )


def descriptor_from_proto(message: kv_transfer_pb2.KvDescriptor, field: str = "kv") -> KVDescriptor:
    """Reads a descriptor that came in `field`. Whether its blocks exist is for the reader of the pool to say."""
    for name in ("lease_id", "worker_id", "incarnation", "address"):
        require_set(f"{field}.{name}", getattr(message, name))
    for name in ("generation", "num_tokens"):
        if getattr(message, name) == 0:
            raise InvalidArgumentError(f"{field}.{name}", "must not be 0")
    if not (math.isfinite(message.lease_s) and message.lease_s > 0):
        raise InvalidArgumentError(f"{field}.lease_s", f"must be above 0 s, is {message.lease_s}")
    return KVDescriptor(
        lease_id=message.lease_id,
        lease_slot=message.lease_slot,
        generation=message.generation,
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        address=message.address,
        block_ids=tuple(message.block_ids),
        num_tokens=message.num_tokens,
        lease_s=message.lease_s,
        is_growing=message.is_growing,
    )


def growth_to_proto(growth: Growth) -> kv_transfer_pb2.FollowLeaseResponse:
    """The growth's message."""
    message = kv_transfer_pb2.FollowLeaseResponse(block_ids=growth.block_ids)
    if growth.first_token_ids:
        message.first_token_id, *others = growth.first_token_ids
        message.other_first_token_ids.extend(others)
    return message


def growth_from_proto(message: kv_transfer_pb2.FollowLeaseResponse) -> Growth:
    """What a source says of a growing cache."""
    is_last = message.HasField("first_token_id")
    first_token_ids = (message.first_token_id, *message.other_first_token_ids) if is_last else ()
    return Growth(tuple(message.block_ids), first_token_ids)


def layout_to_proto(layout: KVLayout) -> kv_transfer_pb2.KvLayout:
    """The layout's message."""
    return kv_transfer_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size_tokens=layout.block_size,
        dtype=layout.dtype,
    )


def layout_from_proto(message: kv_transfer_pb2.KvLayout, field: str = "layout") -> KVLayout:
    """Reads a layout that came in `field`."""
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size_tokens"):
        if getattr(message, name) == 0:
            raise InvalidArgumentError(f"{field}.{name}", "must not be 0")
    if message.dtype not in _DTYPES:
        raise InvalidArgumentError(f"{field}.dtype", f"must be one of {', '.join(_DTYPES)}")
    return KVLayout(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size_tokens,
        dtype=message.dtype,
    )


def fingerprint_to_proto(fingerprint: ModelFingerprint) -> common_pb2.ModelFingerprint:
    """The fingerprint's message."""
    return common_pb2.ModelFingerprint(
        model=fingerprint.model,
        weights=fingerprint.weights,
        tokenizer=fingerprint.tokenizer,
        dtype=fingerprint.dtype,
        quantization=fingerprint.quantization,
    )


def fingerprint_from_proto(message: common_pb2.ModelFingerprint, field: str = "fingerprint") -> ModelFingerprint:
    """Reads a worker's fingerprint that came in `field`: a worker holds weights, so none of it may be empty."""
    for name in ("model", "weights", "tokenizer", "dtype", "quantization"):
        require_set(f"{field}.{name}", getattr(message, name))
    for name in ("weights", "tokenizer"):
        if not is_fingerprint(getattr(message, name)):
            raise InvalidArgumentError(f"{field}.{name}", "must be 32 lower-case hexadecimal digits")
    return ModelFingerprint(
        model=message.model,
        weights=message.weights,
        tokenizer=message.tokenizer,
        dtype=message.dtype,
        quantization=message.quantization,
    )


def endpoint_to_request(endpoint: Endpoint) -> kv_transfer_pb2.HandshakeRequest:
    """How a decode worker presents itself."""
    return kv_transfer_pb2.HandshakeRequest(
        worker_id=endpoint.peer.worker_id,
        incarnation=endpoint.peer.incarnation,
        host_id=endpoint.host_id,
        fingerprint=fingerprint_to_proto(endpoint.fingerprint),
        layout=layout_to_proto(endpoint.layout),
        transports=[_TRANSPORTS[transport] for transport in endpoint.transports],
        converts_dtype=endpoint.converts_dtype,
    )


def endpoint_from_proto(request: kv_transfer_pb2.HandshakeRequest) -> Endpoint:
    """Who asks for a handshake."""
    for name in ("worker_id", "incarnation", "host_id"):
        require_set(name, getattr(request, name))
    return Endpoint(
        peer=PeerKey(request.worker_id, request.incarnation),
        host_id=request.host_id,
        fingerprint=fingerprint_from_proto(request.fingerprint),
        layout=layout_from_proto(request.layout),
        transports=tuple(_known(request.transports)),
        converts_dtype=request.converts_dtype,
    )


def endpoint_to_response(
    endpoint: Endpoint, handles: Iterable[PoolHandle], secret: bytes
) -> kv_transfer_pb2.HandshakeResponse:
    """How a prefill worker answers."""
    return kv_transfer_pb2.HandshakeResponse(
        worker_id=endpoint.peer.worker_id,
        incarnation=endpoint.peer.incarnation,
        fingerprint=fingerprint_to_proto(endpoint.fingerprint),
        layout=layout_to_proto(endpoint.layout),
        handles=[_handle_to_proto(handle) for handle in handles],
        pair_secret=secret,
    )


def pool_from_proto(message: kv_transfer_pb2.HandshakeResponse, address: str) -> PeerPool:
    """What the handshake at `address` opened. No handle when no transport joins the two workers."""
    handles = (_handle_from_proto(handle) for handle in message.handles)
    return PeerPool(
        peer=PeerKey(message.worker_id, message.incarnation),
        layout=layout_from_proto(message.layout),
        address=address,
        secret=message.pair_secret,
        handles=tuple(handle for handle in handles if handle is not None),
    )


def part_from_proto(request: kv_transfer_pb2.PullBlocksRequest) -> Part:
    """Which bytes are asked for. Whether the lease has them is for the stream to say."""
    return Part(first_byte=request.first_byte, num_bytes=request.num_bytes, max_piece_bytes=request.max_piece_bytes)


def _known(values: Iterable[int]) -> Iterator[Transport]:
    """The transports among `values` that this version knows."""
    by_value: dict[int, Transport] = {value: transport for transport, value in _TRANSPORTS.items()}
    return (transport for value in values if (transport := by_value.get(value)) is not None)


def _handle_to_proto(handle: PoolHandle) -> kv_transfer_pb2.PoolHandle:
    match handle:
        case ShmHandle():
            shm = kv_transfer_pb2.ShmHandle(segment=handle.segment, num_blocks=handle.num_blocks)
            return kv_transfer_pb2.PoolHandle(shm=shm)
        case CudaIpcHandle():
            return kv_transfer_pb2.PoolHandle(cuda_ipc=kv_transfer_pb2.CudaIpcHandle(**asdict(handle)))
        case DistHandle(transport=Transport.NCCL):
            return kv_transfer_pb2.PoolHandle(nccl=kv_transfer_pb2.DistHandle(host=handle.host, port=handle.port))
        case DistHandle():
            return kv_transfer_pb2.PoolHandle(gloo=kv_transfer_pb2.DistHandle(host=handle.host, port=handle.port))
        case GrpcHandle():
            return kv_transfer_pb2.PoolHandle(grpc=kv_transfer_pb2.GrpcHandle())


def _handle_from_proto(message: kv_transfer_pb2.PoolHandle) -> PoolHandle | None:
    """None for a way that this version doesn't know."""
    match message.WhichOneof("transport"):
        case "shm":
            return ShmHandle(segment=message.shm.segment, num_blocks=message.shm.num_blocks)
        case "cuda_ipc":
            names = [field.name for field in fields(CudaIpcHandle)]
            return CudaIpcHandle(**{name: getattr(message.cuda_ipc, name) for name in names})
        case "nccl":
            return DistHandle(host=message.nccl.host, port=message.nccl.port, transport=Transport.NCCL)
        case "gloo":
            return DistHandle(host=message.gloo.host, port=message.gloo.port, transport=Transport.GLOO)
        case "grpc":
            return GrpcHandle()
    return None


def require_set(field: str, value: str) -> None:
    """Raises InvalidArgumentError when a string that must be there is empty."""
    if not value:
        raise InvalidArgumentError(field, "must not be empty")
