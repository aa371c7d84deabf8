"""The first kernels of a step: one writes new pages to the page table, one fills in promised ids,
one looks up a rank's part of the embedding.

Axes: T tokens, L rows of the embedding's table on this rank, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin

BLOCK = 256
"""A program takes so many ids, two for each thread of four warps."""
EMBED_BLOCK = 1024  # a thread then copies 16 bytes of 16-bit elements at once


def take_ids(token_ids_T: Tensor, table_idxs_D: Tensor, last_token_R: Tensor) -> Tensor:
    """See `Ops.take_ids`."""
    count = len(token_ids_T)
    ids_T = torch.empty_like(token_ids_T)
    _launch_take(
        (-(-count // BLOCK), 1, 1),
        (token_ids_T, table_idxs_D, last_token_R, ids_T, len(table_idxs_D), count),
        (BLOCK,), dtype=torch.int32, num_warps=4,
    )  # fmt: skip
    return ids_T


def write_pages(page_table_RP: Tensor, new_pages_3N: Tensor) -> None:
    """See `Ops.write_pages`."""
    count = new_pages_3N.shape[1]
    if not count:
        return
    _launch_write(
        (-(-count // BLOCK), 1, 1), (page_table_RP, new_pages_3N, count),
        (page_table_RP.stride(0), BLOCK), dtype=torch.int32, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_decodes", "count"], do_not_specialize_on_alignment=["table_idx_ptr"]
)
def _take_ids(
    token_ptr, table_idx_ptr, last_ptr, out_ptr, num_decodes, count,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + t, mask=t < count, other=0)
    promised = (t < num_decodes) & (token < 0)
    row = tl.load(table_idx_ptr + t, mask=promised, other=0)
    tl.store(out_ptr + t, tl.load(last_ptr + row, mask=promised, other=token), mask=t < count)


@triton.jit(do_not_specialize=["count"])
def _write_pages(
    table_ptr, pages_ptr, count, STRIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    row = tl.load(pages_ptr + n, mask=inside, other=0)
    column = tl.load(pages_ptr + count + n, mask=inside, other=0)
    page = tl.load(pages_ptr + 2 * count + n, mask=inside, other=0)
    tl.store(table_ptr + row * STRIDE + column, page.to(tl.int32), mask=inside)


_launch_take = Launcher(_take_ids)
_launch_write = Launcher(_write_pages)


def embed_share(ids_T: Tensor, weight_LD: Tensor, share: range) -> Tensor:
    """See `Ops.embed_share`; both arguments are contiguous."""
    size = weight_LD.shape[1]
    out_TD = torch.empty((len(ids_T), size), dtype=weight_LD.dtype, device=weight_LD.device)
    _launch_embed(
        (len(ids_T), -(-size // EMBED_BLOCK), 1), (ids_T, weight_LD, out_TD),
        (share.start, share.stop, size, EMBED_BLOCK), dtype=weight_LD.dtype, num_warps=4,
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


_launch_embed = Launcher(_embed_share)
