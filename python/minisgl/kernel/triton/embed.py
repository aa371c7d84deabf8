"""A rank's part of an embedding lookup: rows that it holds, zeros for the others.

Axes: T tokens, L rows of the table on this rank, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin

BLOCK = 1024  # a thread then copies 16 bytes of 16-bit elements at once


def embed_share(ids_T: Tensor, weight_LD: Tensor, share: range) -> Tensor:
    """See `Ops.embed_share`; both arguments are contiguous."""
    size = weight_LD.shape[1]
    out_TD = torch.empty((len(ids_T), size), dtype=weight_LD.dtype, device=weight_LD.device)
    _launch(
        (len(ids_T), -(-size // BLOCK), 1), (ids_T, weight_LD, out_TD),
        (share.start, share.stop, size, BLOCK), dtype=weight_LD.dtype, num_warps=4,
    )  # fmt: skip
    return out_TD


@triton.jit
def _embed_share(
    ids_ptr, weight_ptr, out_ptr,
    FIRST: tl.constexpr, STOP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < SIZE
    begin(PDL)
    index = tl.load(ids_ptr + token)
    here = (index >= FIRST) & (index < STOP)
    row = (index - FIRST).to(tl.int64) * SIZE
    x = tl.load(weight_ptr + row + offsets, mask=inside & here, other=0.0)
    tl.store(out_ptr + token * SIZE + offsets, x, mask=inside)


_launch = Launcher(_embed_share)
