"""Grouped GEMMs on Hopper against float64: tiles of every width, idle experts, no pairs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from helpers.gemm_error import ROUNDOFF, exact_gemm
from helpers.grouped_gemm import check_pairs, make_rows

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl_kernels.grouped import MOST, GroupedGemms


@pytest.fixture(scope="module")
def gemms() -> GroupedGemms:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for Hopper")
    return GroupedGemms(torch.bfloat16)


def _check(
    gemms: GroupedGemms,
    counts: list[int],
    outputs: int,
    inputs: int,
    *,
    top_k: int,
    dtype: torch.dtype,
    is_gated: bool,
) -> None:
    torch.manual_seed(sum(counts) + outputs)
    total, experts, share = sum(counts), len(counts), top_k if is_gated else 1
    x = torch.randn(total // share, inputs, device="cuda").to(dtype)
    weight = torch.randn(experts, outputs * (1 + is_gated), inputs, device="cuda")
    weight = (weight * inputs**-0.5).to(dtype)
    assert gemms.takes(x, weight, weight)
    check_pairs(
        partial(gemms.gemm, x, weight), lambda expert, rows: exact_gemm(x[rows], weight[expert]),
        counts, outputs, share=share, dtype=dtype, is_gated=is_gated,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("is_gated", [True, False])
def test_every_width(is_gated: bool, dtype: torch.dtype, gemms: GroupedGemms) -> None:
    counts = [*range(0, MOST + 1, 8), 1, MOST + 1, 2 * MOST - 3, 1000, 0]
    counts[0] += -sum(counts) % 4
    _check(gemms, counts, 264, 192, top_k=4, dtype=dtype, is_gated=is_gated)


@pytest.mark.parametrize(
    ("counts", "outputs", "inputs"),
    [
        ([1], 8, 64),  # of a device's blocks most have nothing to do
        ([0, 0, 3, 0], 40, 64),
        ([0] * 511 + [2000], 128, 128),
        ([300] * 8, 768, 2048),  # more tiles than blocks
        ([17] * 128, 2048, 768),
        ([0, 5000], 4096, 1024),
    ],
    ids=["one pair", "one expert", "the last of 512", "eight", "a decode step of 272", "two"],
)
@pytest.mark.parametrize("is_gated", [True, False])
def test_shapes(
    counts: list[int], outputs: int, inputs: int, is_gated: bool, gemms: GroupedGemms
) -> None:
    kind = torch.bfloat16
    _check(gemms, counts, outputs, inputs, top_k=1, dtype=kind, is_gated=is_gated)


def test_no_pairs_write_nothing(gemms: GroupedGemms) -> None:
    counts_L, rows_LT = make_rows([0] * 8)
    x = torch.zeros(4, 64, device="cuda").bfloat16()  # all of them another rank's
    weight = torch.zeros(8, 128, 64, device="cuda").bfloat16()
    out = torch.full((4, 64), 7.0, device="cuda").bfloat16()
    gemms.gemm(x, weight, counts_L, rows_LT, None, out)
    assert (out == 7).all()
