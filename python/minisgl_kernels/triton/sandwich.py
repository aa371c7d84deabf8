"""Norms of the outputs of attention and MLP: one launch from there to the next layer's input.

A GEMV computes the norm before a plain block's layers itself. It does not compute these norms: each
of its programs would, which takes longer than a launch.
Arithmetic is float32 with a conversion at each rounding, so the compiler cannot fuse across one.

Axes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.elementwise import normed, warps_of
from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl_zoo.blocks.sandwich import Norm, Sandwich

MOST_NORMS = 3  # of one sum


class TritonSandwich(Sandwich):
    """As `Sandwich`, for a GPU."""

    def norm(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        post: Norm | None,
        factor: Tensor | None,
        pre: Sequence[Norm],
    ) -> tuple[list[Tensor], Tensor]:
        assert len(pre) <= MOST_NORMS
        num_tokens, size = x_TD.shape
        is_sum = post is not None or residual_TD is not None or factor is not None
        if not num_tokens or not (pre or is_sum):
            return [x_TD] * len(pre), x_TD
        outs = [torch.empty_like(x_TD) for _ in pre]
        total_TD = torch.empty_like(x_TD) if is_sum else x_TD
        unused: list[tuple[Tensor, Tensor, float]] = [(x_TD, x_TD, 0.0)] * (MOST_NORMS - len(pre))
        of_norms = [(out, *norm) for out, norm in zip(outs, pre, strict=True)] + unused
        _launch_sum(
            (num_tokens, 1, 1),
            (
                x_TD, x_TD if residual_TD is None else residual_TD,
                x_TD if post is None else post.weight, x_TD if factor is None else factor,
                total_TD, *(value for each in of_norms for value in each),
                0.0 if post is None else post.eps,
            ),
            (
                size, power_of_2(size), post is not None, residual_TD is not None,
                factor is not None, is_sum, len(pre),
            ),
            dtype=(
                x_TD.dtype, None if post is None else post.weight.dtype,
                *(norm.weight.dtype for norm in pre),
            ),
            num_warps=warps_of(size),
        )  # fmt: skip
        return outs, total_TD

    def add(self, x_TD: Tensor, x_norm: Norm, y_TD: Tensor, y_norm: Norm) -> Tensor:
        num_tokens, size = x_TD.shape
        out_TD = torch.empty_like(x_TD)
        _launch_add(
            (num_tokens, 1, 1),
            (x_TD, x_norm.weight, y_TD, y_norm.weight, out_TD, x_norm.eps, y_norm.eps),
            (size, power_of_2(size)),
            dtype=(x_TD.dtype, x_norm.weight.dtype, y_norm.weight.dtype), num_warps=warps_of(size),
        )  # fmt: skip
        return out_TD


@triton.jit
def _sum_norms(
    x_ptr, residual_ptr, post_ptr, factor_ptr, total_ptr,
    out_0_ptr, weight_0_ptr, eps_0, out_1_ptr, weight_1_ptr, eps_1, out_2_ptr, weight_2_ptr, eps_2,
    post_eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, POST: tl.constexpr, ADD: tl.constexpr,
    FACTOR: tl.constexpr, TOTAL: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + offsets
    if POST:
        post = tl.load(post_ptr + offsets, mask=mask, other=0.0)
    if FACTOR:
        factor = tl.load(factor_ptr).to(tl.float32)
    begin(PDL)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
    if POST:
        x = normed(x, post, post_eps, SIZE)
    if ADD:
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    if FACTOR:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    if TOTAL:
        tl.store(total_ptr + at, x, mask=mask)
    if NORMS > 0:
        weight = tl.load(weight_0_ptr + offsets, mask=mask, other=0.0)
        tl.store(out_0_ptr + at, normed(x, weight, eps_0, SIZE), mask=mask)
    if NORMS > 1:
        weight = tl.load(weight_1_ptr + offsets, mask=mask, other=0.0)
        tl.store(out_1_ptr + at, normed(x, weight, eps_1, SIZE), mask=mask)
    if NORMS > 2:
        weight = tl.load(weight_2_ptr + offsets, mask=mask, other=0.0)
        tl.store(out_2_ptr + at, normed(x, weight, eps_2, SIZE), mask=mask)


@triton.jit
def _add_norms(
    x_ptr, x_weight_ptr, y_ptr, y_weight_ptr, out_ptr, x_eps, y_eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + offsets
    x_weight = tl.load(x_weight_ptr + offsets, mask=mask, other=0.0)
    y_weight = tl.load(y_weight_ptr + offsets, mask=mask, other=0.0)
    begin(PDL)
    x = normed(tl.load(x_ptr + at, mask=mask, other=0.0), x_weight, x_eps, SIZE).to(tl.float32)
    y = normed(tl.load(y_ptr + at, mask=mask, other=0.0), y_weight, y_eps, SIZE).to(tl.float32)
    tl.store(out_ptr + at, (x + y).to(out_ptr.dtype.element_ty), mask=mask)


_launch_sum = Launcher(_sum_norms)
_launch_add = Launcher(_add_norms)
