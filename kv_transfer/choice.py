"""Which transports two sides have in common. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.descriptor import PoolHandle, Transport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CHEAPEST_FIRST = (Transport.CUDA_IPC, Transport.SHM, Transport.NCCL, Transport.GLOO, Transport.GRPC)
"""No copy but the one into the reader's pool; then a network of the devices' own; then whatever carries gRPC."""

_ONE_HOST = frozenset({Transport.CUDA_IPC, Transport.SHM})
_FITS = {
    "cuda": frozenset({Transport.CUDA_IPC, Transport.NCCL, Transport.GRPC}),
    "cpu": frozenset({Transport.SHM, Transport.GLOO, Transport.GRPC}),
}


def usable(enabled: Iterable[Transport], device: str) -> tuple[Transport, ...]:
    """What of the enabled ways a pool on `device` (`cpu`, `cuda` or `cuda:N`) can take part in, in order of cost."""
    possible = _FITS[device.partition(":")[0]] & set(enabled)
    return tuple(transport for transport in CHEAPEST_FIRST if transport in possible)


def common_handles(
    handles: Sequence[PoolHandle], wanted: Sequence[Transport], *, same_host: bool
) -> tuple[PoolHandle, ...]:
    """The source's handles that the reader can use, in the order of `wanted`."""
    by_transport = {handle.transport: handle for handle in handles}
    return tuple(
        by_transport[transport]
        for transport in wanted
        if transport in by_transport and (same_host or transport not in _ONE_HOST)
    )
