"""Each backend of recurrent layers against the reference: outputs, states and rows.

Random steps of several requests, in which prompts come in chunks and rows decode side by side.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.recurrent import DeltaLayer, RecurrentBackend, TorchRecurrentBackend
from minisgl.attention.recurrent_cpu import CpuRecurrentBackend
from minisgl.core import Context, Plan, PoolBatch
from minisgl.kernel.jit import load_library
from minisgl.kvcache.recurrent import RecurrentPool, RecurrentShape

INTERVAL, LENGTH, NUM_ROWS = 64, 256, 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
# Steps: tokens of each request, decodes first.
STEPS = [
    (50, 64, 1), (30, 1, 70), (1, 1, 1), (1, 0, 57), (1, 1, 1), (100, 62, 1), (1, 1, 1), (1, 1, 40),
]  # fmt: skip


def make(
    backend: type[RecurrentBackend] | str, shape: RecurrentShape, page_size: int
) -> tuple[RecurrentBackend, RecurrentPool, Tensor]:
    num_pages = NUM_ROWS * LENGTH // page_size
    tables = [
        torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()
        for seed in (1, 2)
    ]
    rows, states = (table.view(NUM_ROWS, -1) for table in tables)
    pool = RecurrentPool(
        shape,
        num_layers=1,
        num_states=num_pages,
        num_slots=num_pages * page_size,
        device=torch.device("cpu"),
    )
    for tensor in vars_of(pool):
        tensor.fill_(torch.nan)  # what is read must have been written
    if backend is CpuRecurrentBackend:
        return CpuRecurrentBackend(load_library(), page_size, states), pool, rows
    return TorchRecurrentBackend(page_size, states), pool, rows


def vars_of(pool: RecurrentPool) -> list[Tensor]:
    layer = pool.layer(0)
    return [
        layer.states, layer.tails, layer.inputs, layer.keys, layer.updates, layer.decays,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "dims", "taps", "page_size"),
    [((4, 2), (32, 48), 4, 16), ((3, 3), (12, 20), 2, 1), ((6, 1), (130, 128), 5, 64)],
    ids=str,
)
def test_a_backend_is_its_reference(
    heads: tuple[int, int],
    dims: tuple[int, int],
    taps: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    (num_heads, num_key_heads), (key_dim, value_dim) = heads, dims
    shape = RecurrentShape(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=taps,
        dtype=dtype,
    )
    layer = DeltaLayer(
        pool=0,
        layer_id=0,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        interval=INTERVAL,
    )
    sides = [make(kind, shape, page_size) for kind in (CpuRecurrentBackend, TorchRecurrentBackend)]
    generator = torch.Generator().manual_seed(0)
    weight_WD = torch.randn(taps, shape.conv_width, generator=generator).to(dtype)
    computed = [0] * NUM_ROWS
    for counts in STEPS:
        order = sorted((i for i in range(NUM_ROWS) if counts[i]), key=lambda i: counts[i] > 1)
        starts, ends = [computed[i] for i in order], [computed[i] + counts[i] for i in order]
        for i in order:
            computed[i] += counts[i]
        total = sum(counts)
        wide = torch.randn(total, shape.conv_width + 7, generator=generator).to(dtype)
        g_TN = -torch.rand(total, num_heads, generator=generator) * 0.3
        beta_TN = torch.rand(total, num_heads, generator=generator)
        plan = Plan(
            step=0, uids=order, table_idxs=order, starts=starts, ends=ends,
            token_ids=np.zeros(total, np.int32), num_decodes=0, sample_rows=[], output_idxs=[],
        )  # fmt: skip
        spans = list(zip(order, starts, ends, strict=True))
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        owners = torch.cat([torch.full((end - start,), row) for row, start, end in spans])
        outputs = []
        for backend, pool, rows in sides:
            slots = rows[owners, positions // page_size] * page_size + positions % page_size
            batch = PoolBatch(
                positions=positions.int(),
                slots=slots.int(),
                attn_metadata=backend.prepare(plan),
                context=Context(kv_pool=pool, page_table=rows, attn=backend),
            )
            x_TD = wide[:, : shape.conv_width]  # of a wider projection, as the layer has it
            outputs.append(backend.forward(x_TD, g_TN, beta_TN, weight_WD, layer, batch))
        close(*outputs, dtype)
        for ours, theirs in zip(*(vars_of(pool) for _, pool, _ in sides), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan()), "other places are written"
            close(ours.nan_to_num(), theirs.nan_to_num(), dtype)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == theirs.dtype
    assert not theirs.isnan().any()
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"
