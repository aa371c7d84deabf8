"""Decode rows of the gated delta rule on Hopper: the host side of `csrc/cuda/delta_decode.cu`."""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from minisgl.kernel.hopper import TYPES, Kernels, load_gemm

DIM: Final = 128  # of keys and of values
MOST: Final = 64  # tokens of an interval
NUM_THREADS: Final = 128
SHARED_BYTES: Final = 6912  # of a block
VALUES: Final = {128: 45, 64: 3, 32: 0}
"""Values of a block, each with a kernel -> the blocks a multiprocessor from which on it is used.
Blocks of many values read most bytes a second; those of few values end an interval sooner."""


class _Task(ctypes.Structure):
    """struct Task of `csrc/cuda/delta_decode.cu`."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("mixed", "g", "beta", "states", "keys", "updates", "decays", "slots", "rows"),
                *("row_table", "state_table", "out", "rows_stride", "row_stride", "state_stride"),
            )
        ),
        *((name, ctypes.c_int32) for name in ("heads", "key_heads", "interval", "page_size")),
        ("scale", ctypes.c_float),
    )


def kernel_cubin(kind: tuple[torch.dtype, int]) -> bytes:
    """Return the compiled kernel. kind: the dtype of activations, and the values of a block. Raises
    JitUnavailable."""
    dtype, values = kind
    return load_gemm("delta_decode", dtype, (), {"VALUES": values, "SHARED_BYTES": SHARED_BYTES})


class DeltaDecode:
    """The kernels on the current device."""

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        self._kernels = Kernels("delta_decode", kernel_cubin, "Triton's kernel decodes delta nets")

    def takes(self, mixed_BD: Tensor, states: Tensor, interval: int) -> bool:
        """Return whether a kernel takes these sizes. Compiles them at the first call."""
        if mixed_BD.dtype not in TYPES or states.shape[2:] != (DIM, DIM) or interval > MOST:
            return False
        return self._kernels.get_all([(mixed_BD.dtype, values) for values in VALUES])

    def decode(
        self,
        mixed_BD: Tensor,
        g_BN: Tensor,
        beta_BN: Tensor,
        states: Tensor,
        keys: Tensor,
        updates: Tensor,
        decays: Tensor,
        slots: Tensor,
        rows: Tensor,
        row_table: Tensor,
        state_table: Tensor,
        out_BNV: Tensor,
        *,
        num_rows: int,
        interval: int,
        page_size: int,
    ) -> None:
        """See `minisgl.kernel.triton.delta_decode.decode`."""
        num_heads = states.shape[1]
        values = self._values(num_rows * num_heads)
        tensors = (
            mixed_BD, g_BN, beta_BN, states, keys, updates, decays, slots, rows, row_table,
            state_table, out_BNV,
        )  # fmt: skip
        task = _Task(
            *(tensor.data_ptr() for tensor in tensors),
            rows.stride(0), row_table.stride(0), state_table.stride(0),
            num_heads, keys.shape[1], interval, page_size, DIM**-0.5,
        )  # fmt: skip
        self._kernels.launch(
            self._kernels.get((mixed_BD.dtype, values)), num_rows * num_heads * (DIM // values),
            NUM_THREADS, SHARED_BYTES, ctypes.addressof(task),
        )  # fmt: skip

    def _values(self, num_states: int) -> int:
        """Return the values of a block: few, if there are few states, so that no multiprocessor
        is idle."""
        blocks = num_states / self._kernels.num_cores
        return next(size for size, fewest in VALUES.items() if blocks * DIM // size >= fewest)
