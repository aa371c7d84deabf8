"""Every attention backend of a CPU against float64 on contiguous keys and values.

`attention_error` derives what each case may differ by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.attention_error import count_keys, worst_miscount, worst_share
from minisgl.attention import ATTENTION_BACKENDS, AttnLayer, create_attention_backend
from minisgl.core import Context, Plan, PoolBatch
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl.kvcache.pool import MHAKVCache

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("name", [name for name in ATTENTION_BACKENDS if name != "auto"])
# Relative to the largest output: float32 sums in another order; the 16-bit ones round the result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (start, end) of each; layer_id 1 of a pool of 2. sinks: whether heads have them."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Sinks:
    """`minisgl.attention.Sinks`."""

    weight: Tensor


MIXED = ((70, 71), (0, 1), (130, 131), (0, 40), (33, 50), (64, 64 + 19))
CASES = (
    Case(name="decode", rows=((5, 6), (40, 41), (300, 301))),
    Case(name="one long row", rows=((3000, 3001),)),
    Case(name="mixed", rows=MIXED),
    Case(name="page of one", rows=MIXED, page_size=1),
    Case(name="page of 7", rows=MIXED, page_size=7),
    Case(name="multi-head", rows=MIXED, num_q_heads=3, num_kv_heads=3),
    Case(name="7 heads share", rows=MIXED, num_q_heads=14, num_kv_heads=2),
    Case(name="1 head for all", rows=MIXED, num_q_heads=5, num_kv_heads=1),
    Case(name="16 heads share", rows=MIXED, num_q_heads=16, num_kv_heads=1, head_dim=32),
    Case(name="head dim 20", rows=MIXED, head_dim=20),
    Case(name="head dim 80", rows=MIXED, head_dim=80),
    Case(name="head dim 96", rows=MIXED, head_dim=96),
    Case(name="head dim 128", rows=MIXED, head_dim=128),
    Case(name="head dim 1", rows=MIXED, head_dim=1),
    Case(name="head dim 256", rows=MIXED, head_dim=256, num_kv_heads=1),
    Case(name="window 1", rows=MIXED, window=1),
    Case(name="window 24", rows=MIXED, window=24),
    Case(name="window past all", rows=MIXED, window=10_000),
    Case(name="long prefill", rows=((0, 700), (200, 500)), head_dim=32),
)
BOUNDED = (
    Case(name="softcap", rows=MIXED, softcap=5.0),
    Case(name="softcap, window 24", rows=MIXED, softcap=30.0, window=24, head_dim=256),
    Case(name="sinks", rows=(*MIXED, (700, 701)), num_q_heads=16, sinks=True),
    Case(name="sinks, one long row", rows=((3000, 3001),), num_q_heads=8, sinks=True),
    Case(name="sinks, window 24", rows=(*MIXED, (900, 901)), window=24, sinks=True),
    Case(name="sinks, long prefill", rows=((0, 700), (200, 500)), sinks=True, softcap=8.0),
)
"""What transformers' attention of Gemma 2 and gpt-oss has beside scores."""


def is_countable(case: Case) -> bool:
    """So few keys share one dim of one head that rounding hides none; see `count_keys`."""
    return max(end for _, end in case.rows) <= 60 * case.num_kv_heads * case.head_dim


COUNTED = [case for case in CASES if is_countable(case)]


@dataclass(kw_only=True)
class Step:
    plan: Plan
    layer: AttnLayer
    batch: PoolBatch
    q: Tensor
    k: Tensor
    v: Tensor
    contexts: list[tuple[Tensor, Tensor]]


def make_step(case: Case, dtype: torch.dtype, backend_name: str, seed: int = 0) -> Step:
    """Pages in random order, every slot that no position owns poisoned with NaN."""
    gen = torch.Generator().manual_seed(seed)
    backend = create_attention_backend(backend_name, create_ops(CPU))
    per_row = [-(-end // case.page_size) for _, end in case.rows]
    num_pages = sum(per_row) + 3
    pool = MHAKVCache(
        num_layers=2,
        num_pages=num_pages,
        page_size=case.page_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=dtype,
        device=CPU,
    )
    for layer_id in range(2):
        pool.layer(layer_id).k.fill_(torch.nan)
        pool.layer(layer_id).v.fill_(torch.nan)
    order = torch.randperm(num_pages, generator=gen).to(torch.int32)
    table = torch.full((len(case.rows) + 2, max(per_row) + 1), 2**30, dtype=torch.int32)
    table_idxs = [len(case.rows) + 1 - row for row in range(len(case.rows))]
    contexts, slots, new_k, new_v = [], [], [], []
    used = 0
    for table_idx, (start, end), count in zip(table_idxs, case.rows, per_row, strict=True):
        pages = order[used : used + count]
        used += count
        table[table_idx, :count] = pages
        positions = torch.arange(end)
        row_slots = pages[positions // case.page_size] * case.page_size
        row_slots += (positions % case.page_size).int()
        shape = (end, case.num_kv_heads, case.head_dim)
        k = torch.randn(shape, generator=gen).to(dtype)
        v = torch.randn(shape, generator=gen).to(dtype)
        store = pool.layer(1)
        store.k.view(-1, *shape[1:])[row_slots[:start]] = k[:start]
        store.v.view(-1, *shape[1:])[row_slots[:start]] = v[:start]
        contexts.append((k, v))
        slots.append(row_slots[start:])
        new_k.append(k[start:])
        new_v.append(v[start:])
    starts, ends = [list(x) for x in zip(*case.rows, strict=True)]
    num_tokens = sum(ends) - sum(starts)
    plan = Plan(
        step=0,
        uids=list(range(len(case.rows))),
        table_idxs=table_idxs,
        starts=starts,
        ends=ends,
        token_ids=np.zeros(num_tokens, np.int32),
        num_decodes=0,
        sample_rows=[],
        output_idxs=[],
    )
    batch = PoolBatch(
        positions=torch.cat([torch.arange(*row, dtype=torch.int32) for row in case.rows]),
        slots=torch.cat(slots),
        attn_metadata=backend.prepare(plan),
        context=Context(kv_pool=pool, page_table=table, attn=backend),
    )
    layer = AttnLayer(
        layer_id=1,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        scale=case.head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        # As checkpoints have them: FlashAttention takes bfloat16.
        sinks=Sinks((3 + 2 * torch.randn(case.num_q_heads, generator=gen)).bfloat16().float())
        if case.sinks
        else None,
    )
    q_shape = (num_tokens, case.num_q_heads, case.head_dim)
    q = torch.randn(q_shape, generator=gen).to(dtype) * 2
    return Step(
        plan=plan,
        layer=layer,
        batch=batch,
        q=q,
        k=torch.cat(new_k),
        v=torch.cat(new_v),
        contexts=contexts,
    )


def expected(step: Step) -> Tensor:
    """SDPA in float64, one row at a time."""
    out, offset = [], 0
    for (k, v), start, end in zip(step.contexts, step.plan.starts, step.plan.ends, strict=True):
        q = step.q[offset : offset + end - start].double().transpose(0, 1)
        offset += end - start
        query, key = torch.arange(start, end)[:, None], torch.arange(end)[None]
        seen = key <= query
        if step.layer.window is not None:
            seen &= query - key < step.layer.window
        attended = torch.nn.functional.scaled_dot_product_attention(
            q,
            k.double().transpose(0, 1),
            v.double().transpose(0, 1),
            attn_mask=seen,
            scale=step.layer.scale,
            enable_gqa=True,
        )
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", [*CASES, *BOUNDED], ids=lambda case: case.name)
@BACKENDS
def test_rounding_explains_the_error(name: str, case: Case, dtype: torch.dtype) -> None:
    step = make_step(case, dtype, name)
    out = step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
    assert out.dtype == dtype
    share = worst_share(out, step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
@BACKENDS
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
    """The cut into items depends on the threads; the sums may differ in their last bits only."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for case in (CASES[1], CASES[2], CASES[-1]):
            step = make_step(case, torch.float32, "cpu")
            out = step.batch.context.attn.forward(step.q, step.k, step.v, step.layer, step.batch)
            want = expected(step)
            assert (out.double() - want).abs().max() / want.abs().max() <= 2e-6
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


@dataclass(frozen=True, kw_only=True)
class Steps:
    """`minisgl.attention.QKVSteps`, with the plain-torch ops."""

    layer: AttnLayer
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    norm_eps: float
    cos_sin: Tensor

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ops, H = Ops(), self.layer.head_dim
        q_end = self.layer.num_q_heads * H
        k_end = q_end + self.layer.num_kv_heads * H
        q, k, v = (
            part.view(len(qkv), -1, H)
            for part in (qkv[:, :q_end], qkv[:, q_end:k_end], qkv[:, k_end:])
        )
        if self.q_norm_weight is not None:
            q = ops.rms_norm(q, self.q_norm_weight, self.norm_eps)
        if self.k_norm_weight is not None:
            k = ops.rms_norm(k, self.k_norm_weight, self.norm_eps)
        return (*ops.apply_rope(q, k, self.cos_sin, positions_T), v)


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
