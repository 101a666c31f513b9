"""Small tensors on their way to a device and back, through host memory that is kept for it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# As many transfers may be under way before the next one waits: a step makes one, and one more for each window.
NUM_BUFFERS = 4


class Mark(Protocol):
    """A point in what the device was told to do, such as a CUDA event."""

    def record(self) -> None:
        """The point is here: behind all that was enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Returns when the device is past the point; at once without one."""
        ...


class Staging:
    """Buffers for one device, for one thread. They grow to the largest transfer.

    Next to a CUDA device they are pinned, so the host enqueues a copy and goes on; a buffer is written to again when
    the copy from it is over. `mark` makes what that is known by.
    """

    def __init__(self, device: torch.device, mark: Callable[[], Mark] | None = None) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda"
        make = mark or (torch.cuda.Event if self._is_pinned else _Nothing)
        self._buffers = deque((torch.empty(0, dtype=torch.uint8), make()) for _ in range(NUM_BUFFERS))

    def upload(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Copies `values`, in host memory, to a new tensor on the device or to `into`, of the same shape and dtype.

        Enqueued only. `values` may be changed afterwards.
        """
        with torch.inference_mode():
            host, mark = self._next(values)
            host.copy_(values)
            if into is None:
                into = torch.empty(values.shape, dtype=values.dtype, device=self._device)
            into.copy_(host, non_blocking=True)
            mark.record()
            return into

    def download(self, values: torch.Tensor) -> list[int]:
        """The elements of `values` [n], on the device. Blocks until they are known."""
        host, mark = self.begin_download(values)
        mark.synchronize()
        elements: list[int] = host.tolist()
        return elements

    def begin_download(self, values: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Copies `values`, on the device, to host memory that has them when the mark is reached. Enqueued only.

        They stay there until `NUM_BUFFERS` further transfers were begun.
        """
        with torch.inference_mode():
            host, mark = self._next(values)
            host.copy_(values, non_blocking=True)
            mark.record()
            return host, mark

    def _next(self, values: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """The buffer that was used longest ago, as a tensor like `values`."""
        memory, mark = self._buffers.popleft()
        mark.synchronize()
        if len(memory) < values.nbytes:
            memory = torch.empty(max(values.nbytes, 2 * len(memory)), dtype=torch.uint8, pin_memory=self._is_pinned)
        self._buffers.append((memory, mark))
        return memory[: values.nbytes].view(values.dtype).view(values.shape), mark


class _Nothing:
    """Where copies are over when they return."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass
