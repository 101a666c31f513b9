"""Which transports two sides have in common. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.descriptor import PoolHandle, Transport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ONE_HOST = frozenset({Transport.CUDA_IPC, Transport.SHM})
# No copy but the one into the reader's pool; then a network of the devices' own; then what passes through host memory,
# on one host, and by whatever network there is.
_CHEAPEST_FIRST = {
    "cuda": (Transport.CUDA_IPC, Transport.NCCL, Transport.SHM, Transport.GLOO, Transport.GRPC),
    "cpu": (Transport.SHM, Transport.GLOO, Transport.GRPC),
}


def usable(enabled: Iterable[Transport], device: str) -> tuple[Transport, ...]:
    """Of the enabled ways those by which memory on `device` (`cpu`, `cuda`, `cuda:N`) can be filled, cheapest first."""
    enabled = set(enabled)
    return tuple(transport for transport in _CHEAPEST_FIRST[device.partition(":")[0]] if transport in enabled)


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
