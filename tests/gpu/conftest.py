"""Every test here needs a CUDA device and is skipped without one."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "tests/gpu" in item.path.as_posix() and (marker := item.get_closest_marker("gpu")):
            num_needed = marker.kwargs.get("num_devices", 1)
            if num_devices < num_needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {num_needed} CUDA devices, has {num_devices}"))
