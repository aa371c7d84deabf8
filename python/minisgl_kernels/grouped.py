"""The grouped GEMMs of experts on Hopper: the host side of `csrc/grouped.cu`.

There is a kernel for each dtype and activation, which takes all sizes. NVRTC compiles it in 8 s,
and it is cached on disk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl_kernels.hopper import INPUTS, TYPES, Kernels, load_gemm

MOST = 192
"""Pairs of a tile. More need more registers than there are."""
STAGES = 3
STEP = 16  # widths of tiles are multiples of it
BOX = 128  # rows of weights that one copy brings
AT_ONCE = 64  # pairs whose outputs a warpgroup transposes
STAGE_BYTES = STAGES * (2 * BOX + MOST) * INPUTS * 2  # of all stages
NUM_THREADS = 384  # three warpgroups
MAX_EXPERTS = 512  # on a rank; two numbers of each are in shared memory


_GATES: tuple[Activation | None, ...] = ("silu", None)
"""The activations that most models need: their kernels are compiled from the start."""


class Task(ctypes.Structure):
    """struct Task of `csrc/grouped_tiles.cuh`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("x", "out", "counts", "rows", "scales")),
        *(
            (name, ctypes.c_int32)
            for name in ("experts", "stride", "share", "inputs", "outputs", "width", "groups")
        ),
        ("x_stride", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("scale", "zero", "outer", "bias", "x_scales")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        *((name, ctypes.c_int64) for name in ("partial", "done")),
    )


def make_task(
    x: Tensor, counts_L: Tensor, rows_LT: Tensor, scales: Tensor | None, out: Tensor, outputs: int
) -> Task:
    """Return the task of a GEMM without scales of weights and x, whose numbers have 16 bits.
    outputs: the columns of `out` that are not padding."""
    (num_experts, num_tokens), (num_pairs, width) = rows_LT.shape, out.shape
    return Task(
        x.data_ptr(), out.data_ptr(), counts_L.data_ptr(), rows_LT.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        num_experts, num_tokens, num_pairs // len(x), x.shape[1], outputs, width,
    )  # fmt: skip


def one_stage_bytes(
    row_bytes: int, x_bytes: int, rows: int = 0, factors_row: int = 0, scales_row: int = 0
) -> int:
    """Return the shared memory of a stage. row_bytes: of a row of weights. x_bytes: of all rows of
    x. rows, factors_row, scales_row: of what is fetched beside them, for each half."""
    factors, scales = 2 * _round_up(rows * factors_row), 2 * rows * scales_row
    return _round_up(2 * BOX * row_bytes + x_bytes + factors + scales)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // 1024) * 1024


def beside_bytes(most: int, *, has_pairs: bool = True) -> int:
    """Return the shared memory beside the stages: `TilePairs` of two tiles of `most` pairs or rows,
    outputs that two warpgroups transpose, barriers."""
    return 2 * (8 * (most if has_pairs else 1) + 32) + 2 * AT_ONCE * 128 + 160


def shared_bytes(stage_bytes: int, most: int, num_experts: int, *, has_pairs: bool = True) -> int:
    """Return the shared memory of a block. stage_bytes: of all stages, which are aligned. most:
    pairs or rows of a tile."""
    return stage_bytes + beside_bytes(most, has_pairs=has_pairs) + 8 * num_experts + 1024


def launch(
    kernels: Kernels[Any],
    kernel: int,
    maps: Sequence[bytes],
    task: Task,
    shared_bytes: int,
    num_blocks: int | None = None,
) -> None:
    """Launch a kernel of `grouped_tiles.cuh`. maps: the first of its `Maps`. num_blocks: None is
    one on each multiprocessor."""
    padded = ctypes.create_string_buffer(b"".join(maps), 4 * 128)
    kernels.launch(
        kernel, num_blocks or kernels.num_cores, NUM_THREADS, shared_bytes,
        ctypes.addressof(padded), ctypes.addressof(task),
    )  # fmt: skip


def kernel_cubin(kind: tuple[torch.dtype, Activation | None]) -> bytes:
    """kind: dtype, and the activation of a gate; None for outputs without one. Raises
    JitUnavailable."""
    dtype, gate = kind
    numbers = {"MOST": MOST, "STAGES": STAGES, "BESIDE": beside_bytes(MOST)}
    numbers.update(PACKED=0, TILED=0)
    numbers.update(INPUTS=INPUTS, ROW_BYTES=2 * INPUTS, X_SCALES=0, STREAM=0)
    numbers.update(GATED=gate is not None, GELU=gate == "gelu_tanh")
    columns = range(STEP, MOST + 1, STEP)
    return load_gemm("grouped", dtype, columns, numbers, ("grouped_tiles.cuh",))


class GroupedGemms:
    """The kernels on the current device."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of the weights that will be loaded. Their kernels are compiled in the background.

        Raises JitUnavailable where nothing can be compiled, RuntimeError without a device.
        """
        self._kernels = Kernels(
            "grouped_product", kernel_cubin, "experts' GEMMs of many rows are Triton's"
        )
        if dtype in TYPES:
            for gate in _GATES:
                self._kernels.begin_compiling((dtype, gate))

    def takes(
        self, x: Tensor, gate_up_LGD: Tensor, down_LDF: Tensor, gate: Activation = "silu"
    ) -> bool:
        """Return whether both GEMMs of these experts can be computed here. Compiles their
        kernels."""
        if x.dtype not in TYPES or len(down_LDF) > MAX_EXPERTS:
            return False
        for weight in (gate_up_LGD, down_LDF):
            if weight.dtype != x.dtype or weight.shape[2] % INPUTS or weight.data_ptr() % 16:
                return False
        return all(self._kernels.get((x.dtype, kind)) is not None for kind in (gate, None))

    def gemm(
        self,
        x: Tensor,
        weight: Tensor,
        counts_L: Tensor,
        rows_LT: Tensor,
        scales: Tensor | None,
        out: Tensor,
        gate: Activation = "silu",
    ) -> None:
        """See `minisgl.kernel.triton.moe.grouped_gemm`. gate: of outputs without scales."""
        kernel = self._kernels.get((x.dtype, gate if scales is None else None))
        assert kernel is not None, "takes() was not asked"
        weight_map = self._kernels.weight_map(
            weight.data_ptr(), weight.shape[0] * weight.shape[1], x.shape[1], BOX
        )
        task = make_task(x, counts_L, rows_LT, scales, out, out.shape[1])
        launch(
            self._kernels,
            kernel,
            (weight_map,),
            task,
            shared_bytes(STAGE_BYTES, MOST, task.experts),
        )
