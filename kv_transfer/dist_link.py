"""What the two sides of the `nccl` and `gloo` transports share: how a call is written, and the pair's communicator.

A call goes over the source's rendezvous store, which anybody who reaches its port may write to. So a call is sealed
with the pair's secret, which itself never travels. The blocks go over a communicator of two ranks that is made for
the pair at its first call and thrown away at the first failure; each has an epoch of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import socket
import time
import zlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from kv_transfer.descriptor import Transport
from kv_transfer.errors import TransferFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Self

    from torch.distributed import Store  # type: ignore[attr-defined]

SOURCE_RANK, READER_RANK = 0, 1
CALLS = "calls"
PIECE_BYTES = 4 * 2**20
"""Most of one message, and what passes between two looks at the lease."""

SOURCE_IDLE_S = 60.0
"""After so long without a call a pair's communicator is given up by the source: NCCL's hold device memory."""

READER_IDLE_S = SOURCE_IDLE_S / 2
"""After so long its reader makes a new one: it must never call for one that the source may have given up."""

_SEAL_BYTES = 32
_POLL_S = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A reader asks for a lease's blocks.

    `pair` and `epoch` name the communicator, `reply` is where the source's words are waited for. `pieces` are
    (index of the first block, number of blocks): each lies in one stretch on both sides and is sent as one message.
    An empty `lease_id` says that the pair's communicator is not wanted any more.
    """

    pair: str
    epoch: str
    reply: str
    lease_id: str
    pieces: tuple[tuple[int, int], ...]

    def seal(self, secret: bytes) -> bytes:
        """The call as it travels."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        return hmac.digest(secret, body, hashlib.sha256) + body

    @classmethod
    def peek(cls, message: bytes) -> Self:
        """The call in a message, whoever sent it. ValueError when there is none."""
        fields = json.loads(message[_SEAL_BYTES:])
        try:
            call = cls(**fields | {"pieces": tuple((int(first), int(count)) for first, count in fields["pieces"])})
            bytes.fromhex(call.pair)
            if not isinstance(call.reply, str) or not isinstance(call.lease_id, str) or not isinstance(call.epoch, str):
                raise TypeError("a field of another type")
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError("not a call") from error
        return call

    @staticmethod
    def is_sealed(message: bytes, secret: bytes) -> bool:
        """Whether the holder of `secret` wrote the message."""
        return hmac.compare_digest(message[:_SEAL_BYTES], hmac.digest(secret, message[_SEAL_BYTES:], hashlib.sha256))


class Link:
    """A pair's communicator. For one thread, but for `abort`. Every call ends within `timeout_s`, one way or another.

    What torch raises comes out as TransferFailedError; the link is then of no further use.
    """

    def __init__(self, transport: Transport, store: Store, rank: int, host: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_gloo = transport is Transport.GLOO
        self._stream: torch.cuda.Stream | None = None
        timeout = timedelta(seconds=timeout_s)
        try:
            self._group = _gloo(store, rank, host, timeout) if self._is_gloo else _nccl(store, rank, timeout)
        except RuntimeError as error:
            raise TransferFailedError(f"{transport.value} cannot connect the two workers") from error

    def start_send(self, tensor: torch.Tensor) -> Any:
        """Begins to send; `tensor` must stay as it is until `finish`."""
        return self._start(self._group.send, tensor, READER_RANK)

    def start_receive(self, tensor: torch.Tensor) -> Any:
        """Begins to receive; nobody else may touch `tensor` until `finish`."""
        return self._start(self._group.recv, tensor, SOURCE_RANK)

    def finish(self, work: Any) -> None:
        """Waits for what was begun."""
        try:
            if self._is_gloo:
                work.wait(timedelta(seconds=self._timeout_s))
                return
            # NCCL's wait only orders streams; and a call that waits for a dead peer ends by an abort alone.
            give_up_at_s = time.monotonic() + self._timeout_s
            while not work.is_completed():
                if time.monotonic() > give_up_at_s:
                    self.abort()
                    raise TransferFailedError(f"no progress for {self._timeout_s:g} s")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise TransferFailedError("the connection to the other worker broke or stalled") from error

    def abort(self) -> None:
        """Ends whatever is under way, on any thread."""
        self._group.abort()

    def _start(self, call: Any, tensor: torch.Tensor, peer: int) -> Any:
        try:
            if self._is_gloo:
                return call([tensor], peer, 0)
            # Beside the engine's stream, not in line with its kernels.
            self._stream = self._stream or torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                return call([tensor], peer, 0)
        except RuntimeError as error:
            raise TransferFailedError("the connection to the other worker broke") from error


def pieces_of(runs: Sequence[tuple[int, int]], block_bytes: int) -> tuple[tuple[int, int], ...]:
    """Cuts runs of (index of the first block, number of blocks) into messages of at most PIECE_BYTES, or a block."""
    most = max(1, PIECE_BYTES // block_bytes)
    return tuple(
        (start, min(most, first + length - start))
        for first, length in runs
        for start in range(first, first + length, most)
    )


def checksum(tensor: torch.Tensor) -> int | None:
    """CRC-32 of contiguous bytes in CPU memory; None elsewhere, where computing it would cost a copy to the CPU."""
    if tensor.device.type != "cpu":
        return None
    return zlib.crc32((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr()))


def local_host(towards: str, port: int) -> str:
    """The address under which this machine is seen on the way to `towards`. Sends nothing."""
    family, kind, proto, _, address = socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _gloo(store: Store, rank: int, host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)
