"""Sets the logits of forbidden tokens to minus infinity, in one launch after a copy."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin

BLOCK = 4096
"""A program takes so many tokens of a row, whose mask is 512 bytes: one read of four warps."""


def mask(logits_SV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> Tensor:
    """See `Ops.mask`."""
    masked_SV = logits_SV.clone()
    num_vocab = masked_SV.shape[1]
    _launch_mask(
        (len(rows_M), -(-num_vocab // BLOCK), 1), (masked_SV, rows_M, masks_MW),
        (masked_SV.stride(0), masks_MW.stride(0), num_vocab, BLOCK),
        dtype=masked_SV.dtype, num_warps=4,
    )  # fmt: skip
    return masked_SV


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "masks_ptr"])
def _mask(
    logits_ptr, rows_ptr, masks_ptr, STRIDE: tl.constexpr, NUM_WORDS: tl.constexpr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    m = tl.program_id(0)
    row = tl.load(rows_ptr + m)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    word = tl.load(masks_ptr + m * NUM_WORDS + ids // 32, mask=inside, other=-1)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    nothing = tl.full([BLOCK], -float("inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * STRIDE + ids, nothing, mask=inside & forbidden)


_launch_mask = Launcher(_mask)
