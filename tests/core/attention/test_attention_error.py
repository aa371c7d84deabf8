"""The bound of `attention_error`: kernels that round as ours do are within, faults are not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

from helpers.attention_cases import BOUNDED, CASES, Case, Step, expected, make_step
from helpers.attention_error import count_keys, rows_of, worst_miscount, worst_share

LONG = Case(
    name="40,000 keys", rows=((39_999, 40_000),), head_dim=128, num_q_heads=2, num_kv_heads=1
)
HALVES = (torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", HALVES, ids=str)
PARTS = (0.1, 0.35, 0.6, 0.85)


def rounded(step: Step, cut: bool = False) -> Tensor:
    """Online softmax over blocks of keys in float32; weights and output are rounded.

    cut: weights lose their last bits instead, all in one direction.
    """
    dtype, block = step.q.dtype, 64
    out = torch.empty(step.q.shape)
    for row in rows_of(step):
        q, k, v = (x.float() for x in (row.q_NQH, row.k_NCH, row.v_NCH))
        top = torch.full((*q.shape[:2], 1), -1e30)
        mass, acc = torch.zeros_like(top), torch.zeros_like(q)
        if row.sinks_N is not None:
            top, mass = row.sinks_N.float()[:, None, None].expand(top.shape), torch.ones_like(top)
        for first in range(0, k.shape[1], block):
            keys = slice(first, first + block)
            scores = q @ k[:, keys].mT * row.scale
            if row.softcap is not None:
                scores = row.softcap * (scores / row.softcap).tanh()
            scores = scores.masked_fill(~row.seen_QC[:, keys], -torch.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            p, shrink = (scores - new_top).exp(), (top - new_top).exp()
            mass = mass * shrink + p.sum(-1, keepdim=True)
            if cut:
                mantissa, exponent = torch.frexp(p)
                bits = 8 if dtype == torch.bfloat16 else 11
                p = torch.ldexp((mantissa * 2**bits).floor() / 2**bits, exponent)
            acc = acc * shrink + p.to(dtype).float() @ v[:, keys]
            top = new_top
        out[row.tokens] = (acc / mass).transpose(0, 1)
    return out.to(dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, HALVES[number % 2]) for number, case in enumerate((*CASES, *BOUNDED))),
        (LONG, torch.float16),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_rounding_is_a_part_of_the_bound(case: Case, dtype: torch.dtype) -> None:
    step = make_step(case, dtype, "torch")
    most = 0.55 if case.sinks else 0.33  # the only key of a query has a weight to round
    assert worst_share(rounded(step), step) < most
    assert worst_share(rounded(step, cut=True), step) < most


def test_the_truth_is_sdpas() -> None:
    for case in CASES:
        step = make_step(case, torch.float32, "torch")
        truth = torch.cat([(row.weights_NQC @ row.v_NCH).transpose(0, 1) for row in rows_of(step)])
        torch.testing.assert_close(truth, expected(step), rtol=1e-12, atol=1e-12)


def test_the_truth_is_transformers() -> None:
    for case in BOUNDED:
        step = make_step(case, torch.float32, "torch")
        for row in rows_of(step):
            mask = torch.zeros(row.seen_QC.shape).masked_fill(~row.seen_QC, -torch.inf).double()
            module = SimpleNamespace(
                num_key_value_groups=1, training=False, sinks=row.sinks_N, is_causal=True
            )
            q, k, v = (x[None] for x in (row.q_NQH, row.k_NCH, row.v_NCH))
            if row.softcap is None:
                truth, _ = gpt_oss(module, q, k, v, mask, row.scale)
            elif row.sinks_N is None:
                truth, _ = gemma2(module, q, k, v, mask, scaling=row.scale, softcap=row.softcap)
            else:
                continue  # no model has both
            ours = (row.weights_NQC @ row.v_NCH).transpose(0, 1)
            torch.testing.assert_close(ours, truth[0], rtol=1e-6, atol=1e-6)


def with_other_keys(case: Case, dtype: torch.dtype, first: int, last: int) -> Step:
    """The case's step where the first row has keys [first, last) from 32 tokens before."""
    step = make_step(case, dtype, "torch")
    for x in step.contexts[0]:
        x[first:last] = x[first - 32 : last - 32].clone()
    return step


@pytest.mark.parametrize(
    ("context", "dtype", "part"),
    [
        *((300, torch.bfloat16, part) for part in PARTS[::3]),
        *((3000, dtype, part) for index, dtype in enumerate(HALVES) for part in PARTS[index::2]),
        (40_000, torch.float16, PARTS[-1]),
    ],
)
def test_a_wrong_page_is_beyond_the_bound(context: int, dtype: torch.dtype, part: float) -> None:
    case = Case(name="decode", rows=((context - 1, context),), head_dim=128)
    first = max(int(part * context) // 16 * 16, 32)
    got = rounded(with_other_keys(case, dtype, first, first + 16))
    assert worst_share(got, make_step(case, dtype, "torch")) > 1


@DTYPES
@pytest.mark.parametrize("window", [23, 25])
def test_a_key_too_few_or_too_many_is_beyond_the_bound(window: int, dtype: torch.dtype) -> None:
    case = Case(name="window", rows=((70, 71), (0, 40)), window=window)
    got = rounded(make_step(case, dtype, "torch"))
    assert worst_share(got, make_step(replace(case, window=24), dtype, "torch")) > 1


@DTYPES
def test_a_nan_is_beyond_the_bound(dtype: torch.dtype) -> None:
    step = make_step(CASES[0], dtype, "torch")
    got = rounded(step)
    got[0, 0, 0] = torch.nan
    assert not worst_share(got, step) <= 1


@pytest.mark.parametrize(
    ("key", "dtype"), [(0, torch.bfloat16), (4321, torch.float16), (9999, torch.bfloat16)]
)
def test_each_key_of_10_000_counts(key: int, dtype: torch.dtype) -> None:
    case = Case(name="10,000 keys", rows=((9_999, 10_000),), head_dim=128)
    step = make_step(case, dtype, "torch")
    count_keys(step)
    assert worst_miscount(rounded(step), step) < 0.2
    step.contexts[0][1][key] = 0
    got = rounded(step)
    count_keys(step)
    assert worst_miscount(got, step) > 0.8


@DTYPES
def test_a_key_of_another_row_counts(dtype: torch.dtype) -> None:
    step = make_step(Case(name="two rows", rows=((40, 41), (0, 100))), dtype, "torch")
    count_keys(step)
    (k, _), (other, _) = step.contexts
    k[7] = other[7]
    got = rounded(step)
    count_keys(step)
    assert worst_miscount(got, step) > 0.05
