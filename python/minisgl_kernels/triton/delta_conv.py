"""The short convolution of a recurrent layer, and what later steps need of its inputs.

A program has one token and a block of channels; in steps with prompts it has several tokens, at
once where all that they need are inputs of their row in this step. Inputs before the row's first
token come from the rings of the rows group, and before the last state from the state's page
(`minisgl_zoo.recurrent.spec`). A row of several tokens overwrites entries that its first ones read,
so a second launch writes these.

Axes: T tokens, B rows, D channels, W taps, R entries of a ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin

BLOCK = 1024
TOKENS = 4  # of a program, in steps with prompts


def convolve(
    x_TD: Tensor,
    weight_WD: Tensor,
    bias_D: Tensor | None,
    tails: Tensor,
    inputs: Tensor,
    slots: Tensor,
    owners: Tensor,
    rows: Tensor,
    row_table: Tensor,
    state_table: Tensor,
    *,
    num_prompts: int,
    interval: int,
    page_size: int,
) -> Tensor:
    """Return [T, D], packed. owners: int32 [T], the row of each token. rows: `PoolBatch.rows`.
    The tables are those of the rows group and the state group. num_prompts: the last rows, which
    may have several tokens."""
    num_tokens, width = x_TD.shape
    tokens = TOKENS if num_prompts else 1
    out = torch.empty((num_tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    _launch_convolve(
        (-(-num_tokens // tokens), -(-width // BLOCK), 1),
        (
            x_TD, weight_WD, weight_WD if bias_D is None else bias_D, tails, inputs, slots, owners,
            rows, row_table, state_table, out, rows.stride(0), num_tokens,
        ),
        (
            x_TD.stride(0), row_table.stride(0), state_table.stride(0), width, len(weight_WD),
            interval, page_size, min(page_size, len(weight_WD)), BLOCK, bias_D is not None,
            tokens,
        ),
        dtype=x_TD.dtype, num_warps=4 if tokens == 1 else 8,
    )  # fmt: skip
    if num_prompts:
        _launch_keep_inputs(
            (num_prompts, -(-width // BLOCK), len(weight_WD) - 1),
            (x_TD, inputs, slots, rows, rows.shape[1] - num_prompts, rows.stride(0)),
            (
                x_TD.stride(0), width, len(weight_WD), interval, page_size,
                min(page_size, len(weight_WD)), BLOCK,
            ),
            dtype=x_TD.dtype, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["rows_stride", "num_tokens"],
    do_not_specialize_on_alignment=["slots_ptr", "owners_ptr", "rows_ptr"],
)
def _convolve(
    x_ptr, weight_ptr, bias_ptr, tails_ptr, inputs_ptr, slots_ptr, owners_ptr, rows_ptr,
    row_table_ptr, state_table_ptr, out_ptr, rows_stride, num_tokens,
    X_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, R: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = tl.program_id(0) * TOKENS
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if TOKENS > 1:
        last = tl.minimum(token + TOKENS, num_tokens) - 1
        row = tl.load(owners_ptr + token)
        end = tl.load(rows_ptr + 3 * rows_stride + row)
        start = end - tl.load(rows_ptr + 2 * rows_stride + row)
        position = start + token - tl.load(rows_ptr + rows_stride + row)
        newest = end // C * C
        inside_row = (position >= start + W - 1) & (tl.load(owners_ptr + last) == row)
        # A state begins with the inputs before it.
        is_kept = (position + TOKENS > newest - (W - 1)) & (position < newest)
        if inside_row & ((newest <= start // C * C) | (is_kept == 0)):
            t = token + tl.arange(0, TOKENS)[:, None]
            inside = (t <= last) & (d < D)[None, :]
            at = t.to(tl.int64) * X_STRIDE + d[None, :]
            x = tl.load(x_ptr + at, mask=inside, other=0.0)
            weight = tl.load(weight_ptr + (W - 1) * D + d, mask=d < D, other=0.0)
            acc = x.to(tl.float32) * weight[None, :]
            for w in tl.static_range(W - 1):
                before = tl.load(x_ptr + at + (w - (W - 1)) * X_STRIDE, mask=inside, other=0.0)
                weight = tl.load(weight_ptr + w * D + d, mask=d < D, other=0.0)
                acc += before.to(tl.float32) * weight[None, :]
            if HAS_BIAS:
                acc += tl.load(bias_ptr + d, mask=d < D, other=0.0)[None, :]
            out = _activated(acc, x.dtype)
            tl.store(out_ptr + t.to(tl.int64) * D + d[None, :], out, mask=inside)
        else:
            for i in range(last + 1 - token):
                _convolve_one(
                    token + i, d, x_ptr, weight_ptr, bias_ptr, tails_ptr, inputs_ptr, slots_ptr,
                    owners_ptr, rows_ptr, row_table_ptr, state_table_ptr, out_ptr, rows_stride,
                    X_STRIDE, ROW_STRIDE, STATE_STRIDE, D, W, C, Z, R, HAS_BIAS,
                )  # fmt: skip
    else:
        _convolve_one(
            token, d, x_ptr, weight_ptr, bias_ptr, tails_ptr, inputs_ptr, slots_ptr, owners_ptr,
            rows_ptr, row_table_ptr, state_table_ptr, out_ptr, rows_stride,
            X_STRIDE, ROW_STRIDE, STATE_STRIDE, D, W, C, Z, R, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def _activated(acc, dtype: tl.constexpr):
    """Return silu of the rounded sums."""
    acc = acc.to(dtype).to(tl.float32)
    return (acc / (1 + tl.exp(-acc))).to(dtype)


@triton.jit
def _convolve_one(
    token, d, x_ptr, weight_ptr, bias_ptr, tails_ptr, inputs_ptr, slots_ptr, owners_ptr, rows_ptr,
    row_table_ptr, state_table_ptr, out_ptr, rows_stride,
    X_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one token's output, and store what later steps need of its input."""
    inside = d < D
    row = tl.load(owners_ptr + token)
    table_idx = tl.load(rows_ptr + row).to(tl.int64)
    first = tl.load(rows_ptr + rows_stride + row)
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    start = end - tl.load(rows_ptr + 2 * rows_stride + row)
    position = start + token - first
    base = start // C * C
    newest = end // C * C
    state = tl.zeros([], tl.int64)
    if base > 0:
        state = tl.load(state_table_ptr + table_idx * STATE_STRIDE + base // Z - 1).to(tl.int64)

    x_at = token.to(tl.int64) * X_STRIDE + d
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0)
    acc = x.to(tl.float32) * tl.load(weight_ptr + (W - 1) * D + d, mask=inside, other=0.0)
    for w in tl.static_range(W - 1):
        at = position - (W - 1) + w
        entry = tl.load(
            row_table_ptr + table_idx * ROW_STRIDE + at // Z, mask=(at >= base) & (at < start),
            other=0,
        ).to(tl.int64) * R + at % Z % R  # fmt: skip
        near = tl.load(x_ptr + x_at + (at - position) * X_STRIDE, mask=inside & (at >= start),
                       other=0.0)  # fmt: skip
        old = tl.load(inputs_ptr + entry * D + d, mask=inside & (at >= base) & (at < start),
                      other=0.0)  # fmt: skip
        tail = state * (W - 1) + at - base + W - 1
        far = tl.load(tails_ptr + tail * D + d, mask=inside & (at < base) & (base > 0), other=0.0)
        # One of the three is not 0.
        before = near.to(tl.float32) + old.to(tl.float32) + far.to(tl.float32)
        acc += before * tl.load(weight_ptr + w * D + d, mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + d, mask=inside, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * D + d, _activated(acc, x.dtype), mask=inside)

    own = tl.load(slots_ptr + token).to(tl.int64)
    is_kept = (own >= 0) & (position >= newest) & (end - start == 1)
    tl.store(inputs_ptr + (own // Z * R + own % Z % R) * D + d, x, mask=inside & is_kept)
    if newest > base:
        new = tl.load(state_table_ptr + table_idx * STATE_STRIDE + newest // Z - 1).to(tl.int64)
        index = position - newest + W - 1
        tail = new * (W - 1) + index
        tl.store(tails_ptr + tail * D + d, x, mask=inside & (index >= 0) & (index < W - 1))
        if position == start:  # also the inputs before this step
            for w in tl.static_range(W - 1):
                at = newest - (W - 1) + w
                is_old = inside & (at < start)
                page = tl.load(row_table_ptr + table_idx * ROW_STRIDE + at // Z, mask=at < start,
                               other=0).to(tl.int64)  # fmt: skip
                old = tl.load(inputs_ptr + (page * R + at % Z % R) * D + d, mask=is_old, other=0.0)
                tl.store(tails_ptr + (new * (W - 1) + w) * D + d, old, mask=is_old)


@triton.jit(
    do_not_specialize=["first_row", "rows_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "rows_ptr"],
)
def _keep_inputs(
    x_ptr, inputs_ptr, slots_ptr, rows_ptr, first_row, rows_stride,
    X_STRIDE: tl.constexpr, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Z: tl.constexpr,
    R: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = first_row + tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    back = 1 + tl.program_id(2)
    first = tl.load(rows_ptr + rows_stride + row)
    length = tl.load(rows_ptr + 2 * rows_stride + row)
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    is_kept = (back <= length) & (end - back >= end // C * C)
    token = (first + length - back).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=is_kept, other=-1).to(tl.int64)
    inside = (d < D) & (slot >= 0)
    x = tl.load(x_ptr + token * X_STRIDE + d, mask=inside, other=0.0)
    tl.store(inputs_ptr + (slot // Z * R + slot % Z % R) * D + d, x, mask=inside)


_launch_convolve = Launcher(_convolve)
_launch_keep_inputs = Launcher(_keep_inputs)
