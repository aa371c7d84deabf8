"""Grouped GEMMs of experts on fp8 tensor cores of Hopper: the host side of
`csrc/fp8_grouped.cu`.

Weights have a scale for each block of 128 x 128. Activations are rounded to fp8 with a scale for
each 128 of a row, as in `minisgl_kernels.triton.fp8`. There is a kernel for each activation of a
gate, and one for outputs without a gate; each takes all sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.triton.moe import SILU, Gate
from minisgl_kernels.grouped import (
    BOX,
    MAX_EXPERTS,
    STEP,
    beside_bytes,
    launch,
    make_task,
    shared_bytes,
)
from minisgl_kernels.hopper import INPUTS, Kernels, load_gemm
from minisgl_kernels.packed import MAX_FP8
from minisgl_kernels.packed_formats import gate_number
from minisgl_kernels.triton.fp8 import BLOCK, quantise
from minisgl_zoo.weights.quantised import Packed

MOST = 128
"""Pairs of a tile. Their sums and the products of half a turn are in registers."""
STAGES = 3
STAGE_BYTES = STAGES * (2 * BOX + MOST) * BLOCK  # of all stages
SCALE_BYTES = STAGES * MOST * 4  # of the scales of x beside them
FEWEST_TOKENS = MAX_FP8 + 1
"""With fewer, activations are not rounded, as in dense layers."""


def kernel_cubin(gate: int | None) -> bytes:
    """Return the compiled kernel. gate: of `gate_number`; None for outputs without one. Raises
    JitUnavailable."""
    numbers = {"MOST": MOST, "STAGES": STAGES, "BESIDE": beside_bytes(MOST) + SCALE_BYTES}
    numbers.update(INPUTS=INPUTS, ROW_BYTES=BLOCK, PACKED=0, TILED=0, X_SCALES=1, STREAM=0)
    numbers.update(GATED=gate is not None, GATE=gate or 0)
    headers = ("gate.cuh", "grouped_tiles.cuh")
    columns = range(STEP, MOST + 1, STEP)
    return load_gemm("fp8_grouped", torch.bfloat16, columns, numbers, headers, is_fp8=True)


class Fp8Grouped:
    """The kernels on the current device."""

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        self._kernels = Kernels(
            "grouped_product", kernel_cubin, "experts' weights of fp8 are decoded"
        )

    def takes(self, x: Tensor, gate_up: Packed, down: Packed, gate: Gate) -> bool:
        """Return whether both GEMMs of these experts can be computed here, if gate and up have no
        biases. Compiles their kernels."""
        if len(x) < FEWEST_TOKENS or x.dtype != torch.bfloat16 or gate.is_squared:
            return False
        if not (_has_blocks(gate_up) and _has_blocks(down)):
            return False
        return self._kernels.get_all((gate_number(gate), None))

    def gemm(
        self,
        x: Tensor,
        weight: Packed,
        counts_L: Tensor,
        rows_LT: Tensor,
        scales: Tensor | None,
        out: Tensor,
        gate: Gate = SILU,
    ) -> None:
        """See `minisgl.kernel.triton.moe.grouped_gemm`. gate: of outputs without scales."""
        kernel = self._kernels.get(gate_number(gate) if scales is None else None)
        assert kernel is not None, "takes() was not asked"
        assert weight.scale is not None
        numbers, x_scales = quantise(x, BLOCK)
        units = numbers.view(torch.int16)[: len(x)]
        task = make_task(units, counts_L, rows_LT, scales, out, out.shape[1])
        task.x_scales, task.x_stride = x_scales.data_ptr(), x_scales.shape[1]
        task.scale, task.groups = weight.scale.data_ptr(), weight.scale.shape[-1]
        task.alpha, task.limit = gate.alpha, gate.limit
        num_experts, outputs, _ = weight.shape
        weight_map = self._kernels.weight_map(
            weight.numbers.data_ptr(), num_experts * outputs, units.shape[1], BOX
        )
        needed = shared_bytes(STAGE_BYTES, MOST, num_experts) + SCALE_BYTES
        launch(self._kernels, kernel, (weight_map,), task, needed)


def _has_blocks(weight: Packed) -> bool:
    """Return whether this is a stack of fp8 with blocks of 128 x 128 that a kernel reads."""
    num_experts, outputs, inputs = weight.shape
    if weight.kind != "fp8" or weight.outer is not None or num_experts > MAX_EXPERTS:
        return False
    if weight.scale is None or weight.scale.dtype != torch.float32:
        return False
    if (weight.rows, weight.group) != (BLOCK, BLOCK) or weight.numbers.data_ptr() % 16:
        return False
    return outputs % BLOCK == 0 and inputs % BLOCK == 0
