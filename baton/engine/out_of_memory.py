"""How a failed allocation shows itself. Imports no torch: whoever copies KV blocks asks too."""

from __future__ import annotations

# PyTorch's CPU allocator and the libraries below it raise a plain RuntimeError; so does the device allocator, by a
# subclass of it.
_TEXTS = (
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "Cannot allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on whatever device and in whatever library."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
