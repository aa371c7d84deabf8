"""Attention over caches of 8 bits, against float64 on the numbers that the cache holds.

`test_the_bound_sees_a_wrong_scale` gives each head its neighbour's scale, and must fail the bound.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.attention_cases import BACKENDS, BOUNDED, CASES, MIXED, Case, Step, Steps, make_step
from helpers.attention_error import worst_share
from helpers.quantised_kv import FP8, KV_DTYPES, as_stored, bits, put
from minisgl.kernel.ops import Ops
from minisgl.kvcache.pool import LayerPool

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV = pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=lambda dtype: str(dtype)[6:])
SAMPLE = [
    case
    for case in (*CASES, *BOUNDED)
    if case.name
    in {
        "mixed", "one long row", "page of 7", "7 heads share", "head dim 20", "head dim 80",
        "head dim 128", "head dim 1", "window 24", "sinks, window 24", "sinks, long prefill",
    }
]  # fmt: skip
HALVES = {"mixed", "head dim 1", "7 heads share", "window 24"}  # cases for float16, too


def attend(step: Step) -> Tensor:
    out: Tensor = step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
    return out


def pool_of(step: Step) -> LayerPool:
    layer: LayerPool = step.batch.context.kv_pool.layer(1)
    return layer


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{str(dtype)[6:]}")
        for case in SAMPLE
        for dtype in (DTYPES if case.name in HALVES else DTYPES[:2])
    ],
)
@KV
@BACKENDS
def test_rounding_explains_the_error(
    name: str, kv_dtype: torch.dtype, case: Case, dtype: torch.dtype
) -> None:
    step = make_step(case, dtype, name, kv_dtype=kv_dtype)
    out = attend(step)
    assert out.dtype == dtype
    share = worst_share(out, step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


@KV
@BACKENDS
def test_the_bound_sees_a_wrong_scale(name: str, kv_dtype: torch.dtype) -> None:
    """It holds for the scales of the pool alone."""
    for of_keys in (True, False):
        step = make_step(CASES[2], torch.float32, name, kv_dtype=kv_dtype)
        pool = pool_of(step)
        scale = pool.k_scale if of_keys else pool.v_scale
        assert scale is not None
        step.batch.slots.fill_(-1)  # all is stored already
        for row, (k, v) in enumerate(step.contexts):
            positions = torch.arange(len(k))
            pages = step.batch.context.page_table[step.plan.table_idxs[row], positions // 16]
            put(pool, pages * 16 + positions % 16, k, v)
        assert worst_share(attend(step), step) <= 1
        scale.copy_(scale.flip(-1))
        assert worst_share(attend(step), step) > 10


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@KV
@BACKENDS
def test_stored_bits(name: str, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Those of the oracle, in the step's slots; all others stay as they are."""
    case = Case(name="stored", rows=MIXED, head_dim=80)
    ours, wanted = (make_step(case, dtype, name, kv_dtype=kv_dtype) for _ in range(2))
    for step in (ours, wanted):
        step.k[3, 0] = 0  # takes the scale 1
        step.k[4, 1] *= 1e-3  # subnormal in e4m3
        step.v[5, 0, 0] = 6e4  # too large for it
        step.batch.slots[7] = -1
    attend(ours)
    taken = wanted.batch.slots >= 0
    put(pool_of(wanted), wanted.batch.slots[taken], wanted.k[taken], wanted.v[taken])
    for got, want in zip(bits(pool_of(ours)), bits(pool_of(wanted)), strict=True):
        assert torch.equal(got, want)


@BACKENDS
def test_every_number_of_e4m3(name: str) -> None:
    """One key, whose value then comes out as it is; and each number is stored as itself."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    step = make_step(
        Case(name="one key", rows=((0, 1),), num_q_heads=1, num_kv_heads=1, head_dim=256),
        torch.float32, name, kv_dtype=FP8,
    )  # fmt: skip
    pool = pool_of(step)
    assert pool.v_scale is not None
    pool.v_scale.fill_(0.5)
    step.v = every.float()[None, None] * 0.5
    out = attend(step)
    assert torch.equal(out[0, 0].isnan(), every.float().isnan())
    assert torch.equal(out[0, 0].nan_to_num(), every.float().nan_to_num() * 0.5)
    stored = pool.v.flatten(0, 1)[step.batch.slots][0, 0]
    is_nan = every.float().isnan()
    assert torch.equal(stored.view(torch.uint8)[~is_nan], every.view(torch.uint8)[~is_nan])
    assert stored.float()[is_nan].isnan().all()


@KV
@BACKENDS
def test_nan_that_a_query_sees_is_not_hidden(name: str, kv_dtype: torch.dtype) -> None:
    step = make_step(
        Case(name="nan", rows=((0, 40), (90, 91))), torch.float32, name, kv_dtype=kv_dtype
    )
    step.k[5] = torch.nan
    out = attend(step)
    assert out[5:40].isnan().all()
    assert out[:5].isfinite().all()
    assert out[40:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("head_dim", [20, 128])
@KV
def test_cpu_backend_norms_rotates_and_stores(
    kv_dtype: torch.dtype, head_dim: int, dtype: torch.dtype
) -> None:
    """One call against the plain-torch steps one by one, from which it stores the same bits."""
    case = Case(name="qkv", rows=(*MIXED, (600, 601)), head_dim=head_dim)
    fused, plain = (make_step(case, dtype, "cpu", kv_dtype=kv_dtype) for _ in range(2))
    layer = fused.layer
    gen = torch.Generator().manual_seed(0)
    angles = torch.rand(700, head_dim // 2, generator=gen) * 7
    steps = Steps(
        layer=layer,
        q_norm_weight=None,
        k_norm_weight=None,
        norm_eps=1e-6,
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
    )
    width = (layer.num_q_heads + 2 * layer.num_kv_heads) * head_dim
    qkv = torch.randn(len(fused.q), width, generator=gen).to(dtype)
    ours = fused.batch.context.attn.forward_qkv(qkv, steps, fused.batch)
    q, k, v = steps.split(qkv, plain.batch.positions)
    theirs = plain.batch.context.attn.forward(q, k, v, layer, plain.batch).flatten(1)
    # In float32 one of them rotates with fused multiply-adds: a number at a boundary may round
    # either way.
    flips = 1e-3 if dtype == torch.float32 else 0.0
    for got, want in zip(bits(pool_of(fused))[:2], bits(pool_of(plain))[:2], strict=True):
        assert (got != want).float().mean() <= flips
    error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()
    assert error <= (1e-3 if flips else 0)


def test_cpu_backend_refuses_scales_that_do_not_fit() -> None:
    step = make_step(CASES[0], torch.float32, "cpu", kv_dtype=FP8)
    layer = pool_of(step)
    for scale in (None, torch.ones(3), torch.ones(2, dtype=torch.float64)):
        pool = step.batch.context.kv_pool
        pool._layers[1] = LayerPool(k=layer.k, v=layer.v, k_scale=scale, v_scale=layer.v_scale)
        with pytest.raises(ValueError, match="a pool of 8 bits needs float32 scales"):
            attend(step)


@KV
def test_reference_reads_what_it_stores(kv_dtype: torch.dtype) -> None:
    step = make_step(CASES[2], torch.bfloat16, "torch", kv_dtype=kv_dtype)
    layer = pool_of(step)
    slots = torch.tensor([17, -1, 3], dtype=torch.int32)
    k, v = step.k[:3], step.v[:3]
    Ops().store_kv(k, v, slots, layer)
    got_k, got_v = layer.read(torch.tensor([0, 1]))
    want_k, want_v = as_stored(layer, k, v)
    for slot, token in ((17, 0), (3, 2)):
        torch.testing.assert_close(got_k[slot].double(), want_k[token], rtol=1e-6, atol=0)
        torch.testing.assert_close(got_v[slot].double(), want_v[token], rtol=1e-6, atol=0)
