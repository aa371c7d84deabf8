"""Reorders the columns of x as the grouped GEMMs by packed weights need them.

A matrix instruction multiplies the inputs in the order in which a thread decodes its weights, see
`csrc/packed_rows.cuh` and `csrc/tile_rows.cuh`.

Axes: M rows, D columns, P columns with padding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin

BLOCK = 1024
PERIOD = 128
"""Rows of x have a multiple of so many columns: two batches of matrix instructions."""


def arrange(x_MD: Tensor, turn: int, unit: float) -> Tensor:
    """Return x [M, P], times `unit`. P is D, rounded up to `PERIOD`; padding is 0.

    turn: the inputs of 64 bytes of weights: 128 if they have 4 bits, 64 if 8; 16 for the tiles of
    GGUF files.
    """
    rows, columns = x_MD.shape
    padded = -(-columns // PERIOD) * PERIOD
    out_MP = x_MD.new_empty((rows, padded))
    _launch_arrange(
        (rows, -(-padded // BLOCK), 1), (x_MD, out_MP),
        (columns, padded, x_MD.stride(0), turn, unit, BLOCK), dtype=x_MD.dtype, num_warps=4,
    )  # fmt: skip
    return out_MP


@triton.jit
def _arrange(
    x_ptr, out_ptr, D: tl.constexpr, P: tl.constexpr, STRIDE: tl.constexpr, TURN: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step, half, piece, far = place % TURN // 16, place // 8 % 2, place // 2 % 4, place % 2
    if TURN == 16:
        inside = piece * 4 + half * 2 + far
    elif TURN == 64:
        inside = piece * 16 + step * 4 + half + far * 2
    else:
        inside = piece * 32 + step // 2 * 8 + step % 2 * 2 + half + far * 4
    column = place // TURN * TURN + inside
    begin(PDL)
    x = tl.load(x_ptr + row * STRIDE + column, mask=column < D, other=0.0)
    x = (x.to(tl.float32) * UNIT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * P + place, x, mask=place < P)


_launch_arrange = Launcher(_arrange)
