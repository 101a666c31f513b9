"""What stands for CUDA where there is none: FlashInfer's two wrappers, and a recorder of work.

The wrappers take the arguments that FlashInfer documents, and compute, slowly, what it documents of them. The recorder
keeps the operations that were dispatched to PyTorch and runs these again on the same tensors: like a CUDA graph it
knows nothing of what Python did in between.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


@torch.library.custom_op("baton_tests::attend", mutates_args=())
def attend(
    queries: torch.Tensor, cache: torch.Tensor, indptrs: list[torch.Tensor], pages: torch.Tensor, window_left: int
) -> torch.Tensor:
    """One operation, as a kernel. `indptrs`: of query rows, of pages; and the positions in each last page."""
    row_ends, page_ends, last_lengths = (each.tolist() for each in indptrs)
    group = queries.shape[1] // cache.shape[3]
    output = torch.full(queries.shape, math.nan, dtype=queries.dtype)
    for index, last in enumerate(last_lengths):
        rows = slice(row_ends[index], row_ends[index + 1])
        own = cache[pages[page_ends[index] : page_ends[index + 1]].long()].transpose(0, 1).flatten(1, 2).double()
        length = own.shape[1] - cache.shape[2] + last
        keys, values = own[:, :length].repeat_interleave(group, dim=2)
        num_rows = rows.stop - rows.start
        scores = torch.einsum("qhd,khd->hqk", queries[rows].double(), keys) / math.sqrt(queries.shape[2])
        position = torch.arange(length - num_rows, length)[:, None]
        key = torch.arange(length)
        hidden = key > position
        if window_left >= 0:
            hidden |= key < position - window_left
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)
    return output


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")

    def _check(self, arrays: list[torch.Tensor], sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        assert all(each.dtype == torch.int32 and each.dim() == 1 for each in arrays)
        self._sizes, self._dtypes = sizes, dtypes

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        num_qo_heads, num_kv_heads, head_dim, page_size = self._sizes
        assert (q.dtype, paged_kv_cache.dtype) == self._dtypes
        assert q.shape[1:] == (num_qo_heads, head_dim)
        assert paged_kv_cache.shape[1:] == (2, page_size, num_kv_heads, head_dim)
        assert q.stride(-1) == paged_kv_cache.stride(-1) == 1
        return attend(q, paged_kv_cache, self._indptrs, self._pages, self._window_left)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        self._indptrs = [qo_indptr, paged_kv_indptr, paged_kv_last_page_len]
        self._pages, self._window_left = paged_kv_indices, window_left
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._check([*self._indptrs, self._pages], sizes, (q_data_type, kv_data_type))


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: torch.Tensor,
        paged_kv_indices_buffer: torch.Tensor,
        paged_kv_last_page_len_buffer: torch.Tensor,
        backend: str,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_cuda_graph
        assert use_tensor_cores
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        rows = torch.arange(len(paged_kv_indptr_buffer), dtype=torch.int32)
        self._indptrs = [rows, paged_kv_indptr_buffer, paged_kv_last_page_len_buffer]
        self._pages = paged_kv_indices_buffer

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert len(last_page_len) == len(self._indptrs[2]), "a recorded batch size is fixed"
        assert len(indices) <= len(self._pages)
        self._check([indptr, indices, last_page_len], (num_qo_heads, num_kv_heads, head_dim, page_size),
                    (q_data_type, kv_data_type))  # fmt: skip
        self._indptrs[1].copy_(indptr)
        self._indptrs[2].copy_(last_page_len)
        self._pages[: len(indices)].copy_(indices)
        self._window_left = window_left


class TapeRecorder:
    """A `Recorder` on a CPU. `sizes` are the rows of what was replayed, in order."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        with _Tape() as tape:
            output = work()

        def replay() -> None:
            self.replayed.append(len(output))
            tape.replay()

        return output, replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host waits for the device within a recording")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, results in self._calls:
                for result, anew in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                    # Views and what was changed in place are there already.
                    if anew.data_ptr() != result.data_ptr():
                        result.copy_(anew)
