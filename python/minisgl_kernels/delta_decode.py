"""Decode rows of the gated delta rule on Hopper: the host side of `csrc/delta_decode.cu`."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from minisgl_kernels.hopper import TYPES, Kernels, load_gemm
from minisgl_zoo.recurrent.delta_rule import DeltaStep

DIM: Final = 128  # of keys and of values
MOST: Final = 64  # tokens of an interval
NUM_THREADS: Final = 128
SHARED_BYTES: Final = 6912  # of a block
VALUES: Final = {128: 45, 64: 3, 32: 0}
"""Values of a block, each with a kernel -> the blocks a multiprocessor from which on it is used.
Blocks of many values read most bytes a second; those of few values end an interval sooner."""


class _Task(ctypes.Structure):
    """struct Task of `csrc/delta_decode.cu`."""

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

    def takes(self, step: DeltaStep) -> bool:
        """Return whether a kernel takes these sizes. Compiles them at the first call."""
        dtype, sizes = step.mixed_TD.dtype, step.states.shape[2:]
        if dtype not in TYPES or sizes != (DIM, DIM) or step.interval > MOST:
            return False
        return step.skip_N is None and self._kernels.get_all([(dtype, n) for n in VALUES])

    def decode(self, step: DeltaStep, num_rows: int) -> None:
        """See `minisgl_kernels.triton.delta_decode.decode`."""
        num_states = num_rows * step.num_heads
        values = self._values(num_states)
        tensors = (
            step.mixed_TD, step.g_TN, step.beta_TN, step.states, step.keys, step.updates,
            step.decays, step.slots, step.rows, step.row_table, step.state_table, step.out_TNV,
        )  # fmt: skip
        task = _Task(
            *(tensor.data_ptr() for tensor in tensors),
            step.rows.stride(0), step.row_table.stride(0), step.state_table.stride(0),
            step.num_heads, step.num_key_heads, step.interval, step.page_size, DIM**-0.5,
        )  # fmt: skip
        self._kernels.launch(
            self._kernels.get((step.mixed_TD.dtype, values)), num_states * (DIM // values),
            NUM_THREADS, SHARED_BYTES, ctypes.addressof(task),
        )  # fmt: skip

    def _values(self, num_states: int) -> int:
        """Return the values of a block: few, if there are few states, so that no multiprocessor
        is idle."""
        blocks = num_states / self._kernels.num_cores
        return next(size for size, fewest in VALUES.items() if blocks * DIM // size >= fewest)
