"""What the tests of groups of ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def threads_as_before() -> Iterator[None]:
    """A group sets the number of PyTorch's threads in this process; the tests behind it have theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
