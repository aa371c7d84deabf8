"""Norms of what attention and MLP return, against the reference. `TRITON_INTERPRET=1` runs them on
a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.ops import Ops
from minisgl_kernels.triton.sandwich import TritonSandwich
from minisgl_zoo.blocks.sandwich import Norm, Sandwich

REFERENCE, FAST = Sandwich(Ops()), TritonSandwich(Ops())
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = list(TOLERANCE)
# Norm of x, residual, factor.
SUMS = ((True, True, True), (True, True, False), (False, True, True), (False, False, False))


def check(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    """Sums of squares in another order, before each rounding to the dtype."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error <= roundings * TOLERANCE[want.dtype], f"relative error {error:.2e}"


def draw_norm(size: int, dtype: torch.dtype, device: torch.device, eps: float = 1e-6) -> Norm:
    return Norm(torch.randn(size, device=device).to(dtype), eps)


def draw_sum(
    shape: tuple[int, int], which: tuple[bool, bool, bool], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None, Norm | None, Tensor | None]:
    """x, residual, norm of x, factor."""
    has_post, has_residual, has_factor = which
    x, residual = (torch.randn(2, *shape, device=device) * 3).to(dtype)
    post = draw_norm(shape[1], torch.float32, device, eps=1e-3) if has_post else None
    factor = torch.tensor([0.7], device=device).to(dtype) if has_factor else None
    return x, residual if has_residual else None, post, factor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", SUMS, ids=str)
@pytest.mark.parametrize("num_norms", [0, 1, 3])
@pytest.mark.parametrize("shape", [(1, 5376), (7, 50)], ids=str)
def test_norms_of_a_sum(
    shape: tuple[int, int], num_norms: int, which: tuple[bool, bool, bool], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    torch.manual_seed(num_norms)
    x, *others = draw_sum(shape, which, dtype, device)
    pre = [draw_norm(shape[1], dtype, device, eps=10.0**-i) for i in range(num_norms)]
    before = x.clone()
    got, total = FAST.norm(x, *others, pre)
    want, want_total = REFERENCE.norm(x, *others, pre)
    check(total, want_total, 2)
    assert torch.equal(x, before)
    for one, other in zip(got, want, strict=True):
        check(one, other, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_two_norms(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(2, 5, 2816, device=device) * 3).to(dtype)
    norms = [draw_norm(2816, dtype, device, eps) for eps in (1e-6, 1e-2)]
    check(FAST.add(x, norms[0], y, norms[1]), REFERENCE.add(x, norms[0], y, norms[1]))
