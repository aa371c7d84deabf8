"""Checks grouped GEMMs of experts, pair by pair, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from helpers.gemm_error import gated, rounding

Gemm = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Writes the outputs of pairs: counts [L], rows [L, most], scales, out."""
Exact = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Returns the sums of an expert with these rows of x in float64, and their allowed error."""


def make_rows(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (counts [L], rows [L, most]): pairs in random order, then an index that must not be
    read."""
    most, total = max(counts, default=0), sum(counts)
    order = torch.randperm(total, dtype=torch.int32)
    rows = torch.full((len(counts), max(most, 1)), 2**30, dtype=torch.int32)
    for expert, pairs in enumerate(order.split(list(counts))):
        rows[expert, : len(pairs)] = pairs
    return torch.tensor(counts, dtype=torch.int32, device="cuda"), rows.cuda()


def check_pairs(
    gemm: Gemm,
    exact: Exact,
    counts: Sequence[int],
    outputs: int,
    *,
    share: int,
    dtype: torch.dtype,
    is_gated: bool,
) -> None:
    """Check each expert's outputs, that nothing else is written, and that a repeat is equal.

    share: pairs that have a row of x together. is_gated: with silu; else pairs have scales.
    """
    counts_L, rows_LT = make_rows(counts)
    total = sum(counts)
    scales = None if is_gated else torch.rand(total, device="cuda")
    guard = torch.full((total + 2, outputs), torch.nan, dtype=dtype, device="cuda")
    out = guard[1:-1]
    gemm(counts_L, rows_LT, scales, out)
    assert guard[0].isnan().all()
    assert guard[-1].isnan().all()
    for expert, count in enumerate(counts):
        if not count:
            continue
        pairs = rows_LT[expert, :count].long()
        want, error = exact(expert, pairs // share)
        if scales is None:
            want, error = gated(want, error, dtype)
        else:
            scale = scales[pairs, None].double()
            want, error = want * scale, error * scale
        error += rounding(want.abs() + error, dtype)
        worst = ((out[pairs].double() - want).abs() / error).nan_to_num(torch.inf).amax()
        assert worst <= 1, f"expert {expert}: {worst:.2f} of what rounding explains"
    again = torch.empty_like(out)
    gemm(counts_L, rows_LT, scales, again)
    assert torch.equal(again, out)
