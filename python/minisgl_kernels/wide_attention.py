"""Attention of prompts with heads of 512 dims on Hopper: the host side of
`csrc/wide_attention.cu`.

Triton's kernel for these heads reaches a sixth of the matrix instructions' rate, and FlashAttention
has none.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from minisgl_kernels import CSRC
from minisgl_kernels.cubin import load_cubin
from minisgl_kernels.hopper import INPUTS, TYPES, Kernels, multiply_source

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool

DIM: Final = 512
TILE: Final = 64  # queries of a block
NUM_THREADS: Final = 384  # three warpgroups
SHARED_BYTES: Final = 3 * TILE * DIM * 2 + 40 + 1024  # queries, keys, values; barriers; to align


class _Task(ctypes.Structure):
    """struct Task of `csrc/wide_attention.cu`."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("out", "table", "rows", "table_stride", "rows_stride")
        ),
        *((name, ctypes.c_int32) for name in ("num_rows", "heads", "sharing", "page_size", "box")),
        ("scale", ctypes.c_float),
    )


def kernel_cubin(dtype: torch.dtype) -> bytes:
    """Return the compiled kernel. Raises JitUnavailable."""
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    multiplies = multiply_source(TILE, name)
    multiplies += multiply_source(DIM // 2, name, from_registers=True, transposed=True)
    defines = (f"BFLOAT16={int(dtype == torch.bfloat16)}",)
    return load_cubin(CSRC, "wide_attention", "sm_90a", defines, ("hopper.cuh",), multiplies)


class WideAttention:
    """The kernels on the current device."""

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        self._kernels = Kernels("wide_attention", kernel_cubin, "Triton's kernel computes prompts")

    def takes(self, q_TNH: Tensor, pool: LayerPool, out_TNV: Tensor) -> bool:
        """Return whether the kernel takes these sizes, without a window, softcap or sinks. Compiles
        it at the first call. Of latents a value has fewer dims than a key."""
        page_size = pool.k.shape[1]
        if q_TNH.shape[2] != DIM or out_TNV.shape[2] != DIM:
            return False
        if q_TNH.dtype not in TYPES or pool.k.dtype != q_TNH.dtype:
            return False
        if page_size % 8 or (TILE % page_size and page_size % TILE) or q_TNH.data_ptr() % 16:
            return False
        return self._kernels.get(q_TNH.dtype) is not None

    def extend(
        self,
        q_TNH: Tensor,
        pool: LayerPool,
        page_table: Tensor,
        rows: Tensor,
        *,
        scale: float,
        num_tokens: int,
        out_TNH: Tensor,
    ) -> None:
        """See `minisgl.kernel.triton.extend_attention.extend`."""
        num_tensor_tokens, num_heads, _ = q_TNH.shape
        num_pages, page_size, num_kv_heads, _ = pool.k.shape
        box, num_rows = min(page_size, TILE), rows.shape[1]
        q_map = self._kernels.library.tensor_map(
            q_TNH.data_ptr(), num_tensor_tokens, num_heads * DIM, TILE, 2, INPUTS
        )
        k_map, v_map = (
            self._kernels.weight_map(
                tensor.data_ptr(), num_pages * page_size, num_kv_heads * DIM, box
            )
            for tensor in (pool.k, pool.v)
        )
        maps = ctypes.create_string_buffer(bytes(q_map) + k_map + v_map, 384)
        task = _Task(
            out_TNH.data_ptr(), page_table.data_ptr(), rows.data_ptr(), page_table.stride(0),
            rows.stride(0), num_rows, num_heads, num_heads // num_kv_heads, page_size, box,
            scale * math.log2(math.e),
        )  # fmt: skip
        at = ctypes.addressof(maps)
        num_tiles = num_tokens // TILE + num_rows  # at most: each row's last may be cut off
        self._kernels.launch(
            self._kernels.get(q_TNH.dtype), num_tiles * num_heads, NUM_THREADS, SHARED_BYTES,
            at, at + 128, at + 256, ctypes.addressof(task),
        )  # fmt: skip
