"""How many CPU threads one engine process computes with."""

from __future__ import annotations

import torch


def use_threads(num_threads: int) -> None:
    """Sets the threads that compute one operation, for the whole process. Once, before anything is computed."""
    torch.set_num_threads(num_threads)
