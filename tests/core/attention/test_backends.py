"""Every attention backend of a CPU against float64 on contiguous keys and values.

`attention_error` derives what each case may differ by.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from helpers.attention_cases import (
    BACKENDS,
    BOUNDED,
    CASES,
    LATENTS,
    MIXED,
    TWO_WAY,
    Case,
    Steps,
    expected,
    is_countable,
    make_step,
)
from helpers.attention_error import count_keys, worst_miscount, worst_share

# Relative to the largest output: float32 sums in another order; the 16-bit ones round the result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


COUNTED = [case for case in (*CASES, *TWO_WAY) if is_countable(case)]


def each_with_some_dtypes(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Each case in float32, and each third in each of the 16-bit ones, in turn; the C++ kernels, to
    whom bfloat16 is most, have each case in it."""
    triples = [
        pytest.param(name, case, dtype, id=f"{name}-{case.name}-{str(dtype)[6:]}")
        for name in BACKENDS.args[1]
        for number, case in enumerate(cases)
        for index, dtype in enumerate(TOLERANCE)
        if not index or number % 3 == index or (name, index) == ("cpu", 1)
    ]
    return pytest.mark.parametrize(("name", "case", "dtype"), triples)


@each_with_some_dtypes([*CASES, *BOUNDED, *LATENTS, *TWO_WAY])
def test_rounding_explains_the_error(name: str, case: Case, dtype: torch.dtype) -> None:
    step = make_step(case, dtype, name)
    out = step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
    assert out.dtype == dtype
    share = worst_share(out, step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


@each_with_some_dtypes(COUNTED)
def test_each_key_counts_once(name: str, case: Case, dtype: torch.dtype) -> None:
    step = make_step(case, dtype, name)
    count_keys(step)
    out = step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
    miscount = worst_miscount(out, step)
    assert miscount < 0.5, f"off by {miscount:.2f} keys"


@BACKENDS
def test_other_slots_and_layers_stay_as_they_are(name: str) -> None:
    step = make_step(CASES[2], torch.float32, name)
    pool = step.batch.context.kv_pool
    before = pool.layer(1).k.clone()
    step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
    after = pool.layer(1).k.flatten(0, 1)
    assert torch.equal(after[step.batch.slots], step.k)
    untouched = torch.ones(len(after), dtype=torch.bool)
    untouched[step.batch.slots] = False
    torch.testing.assert_close(
        after[untouched], before.flatten(0, 1)[untouched], rtol=0, atol=0, equal_nan=True
    )
    assert pool.layer(0).k.isnan().all()


@BACKENDS
def test_nan_that_a_query_sees_is_not_hidden(name: str) -> None:
    step = make_step(Case(name="nan", rows=((0, 40), (90, 91))), torch.float32, name)
    step.k[5] = torch.nan
    out = step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
    assert out[5:40].isnan().all()
    assert out[:5].isfinite().all()
    assert out[40:].isfinite().all()


@BACKENDS
def test_padding_is_not_stored(name: str) -> None:
    step = make_step(CASES[0], torch.float32, name)
    pool = step.batch.context.kv_pool.layer(1)
    slot = int(step.batch.slots[1])
    step.batch.slots[1] = -1
    before = pool.k.flatten(0, 1).nan_to_num(7.0)
    step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
    after = pool.k.flatten(0, 1).nan_to_num(7.0)
    assert torch.equal(after[slot], before[slot])
    assert (after != before).any(-1).any(-1).sum() == len(step.batch.slots) - 1


@BACKENDS
def test_a_row_reads_what_another_row_of_the_step_writes(name: str) -> None:
    """Both rows have the first page in common; row 0 computes it in this very step."""
    case = Case(name="shared", rows=((0, 200), (64, 150)), page_size=64)
    step = make_step(case, torch.float32, name)
    table = step.batch.context.page_table
    first, second = step.plan.table_idxs
    table[second, 0] = table[first, 0]
    (k0, v0), (k1, v1) = step.contexts
    k1[:64], v1[:64] = k0[:64], v0[:64]
    out = step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
    want = expected(step)
    assert (out.double() - want).abs().max() / want.abs().max() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_cpu_backend_with_other_numbers_of_threads(threads: int) -> None:
    """Several threads share the keys of a long row, whose sink then counts once all the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with_sinks = next(case for case in BOUNDED if case.name == "sinks, one long row")
    try:
        for case in (CASES[1], CASES[2], CASES[-1], with_sinks):
            step = make_step(case, torch.float32, "cpu")
            out = step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
            assert worst_share(out, step) <= 1, case.name
    finally:
        torch.set_num_threads(before)


def test_cpu_backend_refuses_what_does_not_fit() -> None:
    step = make_step(CASES[0], torch.float32, "cpu")
    attend = step.batch.context.attn.forward
    with pytest.raises(ValueError, match="of one dtype"):
        attend(step.q, step.k.half(), step.v, step.layer, step.batch)
    with pytest.raises(ValueError, match="1 key heads do not fit a pool of 2"):
        attend(step.q, step.k[:, :1], step.v[:, :1], step.layer, step.batch)
    step.batch.slots.resize_(2)
    with pytest.raises(ValueError, match="the rows have 3 tokens, the inputs 2"):
        attend(step.q[:2], step.k[:2], step.v[:2], step.layer, step.batch)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (20, 20), (80, 32), (128, 128)])
@pytest.mark.parametrize("norm", [False, True])
def test_cpu_backend_norms_rotates_and_stores(
    norm: bool, head_dim: int, rotary: int, dtype: torch.dtype
) -> None:
    """One call against the plain-torch steps one by one, both the output and the cache."""
    case = Case(name="qkv", rows=(*MIXED, (600, 601)), head_dim=head_dim)
    fused, plain = (make_step(case, dtype, name) for name in ("cpu", "torch"))
    layer = fused.layer
    angles = torch.rand(700, rotary // 2) * 7
    steps = Steps(
        layer=layer,
        q_norm_weight=torch.rand(head_dim).to(dtype) + 0.5 if norm else None,
        k_norm_weight=torch.rand(head_dim).to(dtype) + 0.5 if norm else None,
        norm_eps=1e-6,
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
    )
    width = (layer.num_q_heads + 2 * layer.num_kv_heads) * head_dim
    qkv = torch.randn(len(fused.q), width).to(dtype)
    ours = fused.batch.context.attn.forward_qkv(qkv, steps, fused.batch)
    theirs = plain.batch.context.attn.forward_qkv(qkv, steps, plain.batch)
    assert ours.shape == theirs.shape
    pairs = [(ours, theirs)]
    for kind in ("k", "v"):
        a, b = (getattr(step.batch.context.kv_pool.layer(1), kind) for step in (fused, plain))
        assert torch.equal(a.isnan(), b.isnan())
        pairs.append((a.nan_to_num(), b.nan_to_num()))
    for a, b in pairs:
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert error <= 2 * TOLERANCE[dtype], f"relative error {error:.2e}"
