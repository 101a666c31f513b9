"""Numbers go to a device and come back through pinned memory."""

from __future__ import annotations

import pytest
import torch

from baton.engine.staging import Staging

pytestmark = pytest.mark.gpu


def test_nothing_is_lost_on_the_way():
    staging = Staging(torch.device("cuda"))
    sent = [staging.upload(torch.full((100_000,), number)) for number in range(50)]
    into = torch.zeros(3, dtype=torch.int32, device="cuda")
    staging.upload(torch.tensor([7, 8, 9], dtype=torch.int32), into=into)
    assert [staging.download(each[-1:]) for each in sent] == [[number] for number in range(50)]
    assert staging.download(into) == [7, 8, 9]
    assert all(memory.is_pinned() for memory, _ in staging._buffers)
