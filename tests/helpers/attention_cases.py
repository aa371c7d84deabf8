"""Steps and cases for every attention backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.quantised_kv import as_stored, poison, put
from minisgl.attention import ATTENTION_BACKENDS, AttnLayer, create_attention_backend
from minisgl.core import Context, Plan, PoolBatch
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl.kvcache.pool import MHAKVCache

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("name", [name for name in ATTENTION_BACKENDS if name != "auto"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of attention, in layer 1 of a pool of 2. rows: (start, end). sinks: one for each
    head. latent: see `AttnLayer`. images: (row, start, end) of those that are computed whole."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    latent: int | None = None
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    images: tuple[tuple[int, int, int], ...] = ()


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
LATENTS = (
    Case(name="latents", rows=MIXED, num_q_heads=20, num_kv_heads=1, head_dim=576, latent=512),
    Case(name="latents of 20", rows=(*MIXED, (700, 701)), num_q_heads=3, num_kv_heads=1,
         head_dim=28, latent=20, page_size=4),
    Case(name="latents, 128 heads", rows=((70, 71), (300, 301), (33, 50)), num_q_heads=128,
         num_kv_heads=1, head_dim=576, latent=512, page_size=1),
    Case(name="latents, long prefill", rows=((0, 700), (200, 500)), num_q_heads=2, num_kv_heads=1,
         head_dim=48, latent=32),
)  # fmt: skip
BOUNDED = (
    Case(name="softcap", rows=MIXED, softcap=5.0),
    Case(name="softcap, window 24", rows=MIXED, softcap=30.0, window=24, head_dim=256),
    Case(name="sinks", rows=(*MIXED, (700, 701)), num_q_heads=16, sinks=True),
    Case(name="sinks, one long row", rows=((3000, 3001),), num_q_heads=8, sinks=True),
    Case(name="sinks, window 24", rows=(*MIXED, (900, 901)), window=24, sinks=True),
    Case(name="sinks, long prefill", rows=((0, 700), (200, 500)), sinks=True, softcap=8.0),
)
"""Arguments of transformers' attention of Gemma 2 and gpt-oss beside the scores."""

IMAGES = ((3, 5, 38), (4, 30, 50), (5, 66, 80))  # the second one begins before its row
TWO_WAY = (
    Case(name="images", rows=MIXED, images=IMAGES),
    Case(name="images, window 24", rows=MIXED, images=IMAGES, window=24, num_q_heads=2),
    Case(name="images, long", rows=((0, 700), (200, 500)), head_dim=32,
         images=((0, 30, 400), (0, 401, 700), (1, 150, 420))),
)  # fmt: skip


def is_countable(case: Case) -> bool:
    """Whether few enough keys have the same dim of a head that each one shows; see `count_keys`."""
    if case.latent:
        return False  # `count_keys` needs values that are not keys
    return max(end for _, end in case.rows) <= 60 * case.num_kv_heads * case.head_dim


@dataclass(kw_only=True)
class Step:
    plan: Plan
    layer: AttnLayer
    batch: PoolBatch
    q: Tensor
    k: Tensor
    v: Tensor
    contexts: list[tuple[Tensor, Tensor]]


def make_step(
    case: Case,
    dtype: torch.dtype,
    backend_name: str,
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> Step:
    """Return a step with pages in random order and NaN in every slot that no position owns.

    kv_dtype: the pool's; `contexts` then hold the numbers that attention reads.
    """
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
        dtype=kv_dtype or dtype,
        device=CPU,
        values_are_keys=case.latent is not None,
    )
    for layer_id in range(2):
        poison(pool.layer(layer_id))
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
        v = k if case.latent else torch.randn(shape, generator=gen).to(dtype)
        cached = put(pool.layer(1), row_slots[:start], k[:start], v[:start])
        fresh = as_stored(pool.layer(1), k[start:], v[start:])
        keys, values = (torch.cat(parts) for parts in zip(cached, fresh, strict=True))
        contexts.append((keys, keys[..., : case.latent] if case.latent else values))
        slots.append(row_slots[start:])
        new_k.append(k[start:])
        new_v.append(v[start:])
    starts, ends = [list(x) for x in zip(*case.rows, strict=True)]
    lengths = np.subtract(ends, starts)
    num_tokens = sum(lengths.tolist())
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
    key_ends = [torch.arange(start + 1, end + 1, dtype=torch.int32) for start, end in case.rows]
    for row, start, end in case.images:
        key_ends[row][max(start - starts[row], 0) : end - starts[row]] = end
    batch = PoolBatch(
        positions=torch.cat([torch.arange(*row, dtype=torch.int32) for row in case.rows]),
        slots=torch.cat(slots),
        attn_metadata=backend.prepare(plan),
        context=Context(kv_pool=pool, page_table=table, attn=backend),
        rows=torch.tensor(
            np.array((table_idxs, np.cumsum(lengths) - lengths, lengths, ends)), dtype=torch.int32
        ),
        key_ends=torch.cat(key_ends) if case.images else None,
    )
    layer = AttnLayer(
        layer_id=1,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        scale=case.head_dim**-0.5,
        latent=case.latent,
        window=case.window,
        two_way=bool(case.images),
        softcap=case.softcap,
        # As checkpoints have them: FlashAttention takes bfloat16.
        sinks=Sinks((3 + 2 * torch.randn(case.num_q_heads, generator=gen)).bfloat16().float())
        if case.sinks
        else None,
    )
    q_shape = (num_tokens, case.num_q_heads, case.head_dim)
    q = torch.randn(q_shape, generator=gen).to(dtype) * 2
    k = torch.cat(new_k)
    return Step(
        plan=plan,
        layer=layer,
        batch=batch,
        q=q,
        k=k,
        v=k if case.latent else torch.cat(new_v),
        contexts=contexts,
    )


def expected(step: Step) -> Tensor:
    """Return the output of SDPA in float64, one row at a time."""
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


@dataclass(frozen=True, kw_only=True)
class Steps:
    """`minisgl.attention.QKVSteps`, with the plain-torch ops."""

    layer: AttnLayer
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    norm_eps: float
    cos_sin: Tensor
    norms_values: bool = False
    by_place: bool = True

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
        if self.norms_values:
            v = ops.rms_norm(v, torch.ones(H), self.norm_eps)
        return (*ops.apply_rope(q, k, self.cos_sin, positions_T), v)
