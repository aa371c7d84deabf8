"""Random steps of several requests through a backend of recurrent layers and its reference.

Prompts come in chunks, and rows decode beside them. Outputs, states and rows are compared, and so
are the places that were written: what no step wrote is NaN, and must not be read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.recurrent import DeltaLayer, RecurrentBackend, TorchRecurrentBackend
from minisgl.core import Context, Plan, PoolBatch
from minisgl.kvcache.recurrent import RecurrentPool, RecurrentShape

INTERVAL, LENGTH, NUM_ROWS = 64, 256, 3
# Steps: tokens of each request.
STEPS = [
    (50, 64, 1), (30, 1, 70), (1, 1, 1), (1, 0, 57), (1, 1, 1), (100, 62, 1), (1, 1, 1), (1, 1, 40),
]  # fmt: skip


def tensors_of(pool: RecurrentPool) -> list[Tensor]:
    layer = pool.layer(0)
    return [
        layer.states, layer.tails, layer.inputs, layer.keys, layer.updates, layer.decays,
    ]  # fmt: skip


def check_backend(
    make: Callable[[int, Tensor], RecurrentBackend],
    heads: tuple[int, int],
    dims: tuple[int, int],
    taps: int,
    page_size: int,
    dtype: torch.dtype,
    tolerance: float,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a device is a constant
) -> None:
    """make: from page size and page table of the states. heads: value heads and key heads. dims:
    of a key and a value. tolerance: of the largest value."""
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
    generator = torch.Generator().manual_seed(0)
    num_pages = NUM_ROWS * LENGTH // page_size
    row_table, state_table = (
        torch.randperm(num_pages, generator=generator).int().view(NUM_ROWS, -1).to(device)
        for _ in range(2)
    )
    sides = []
    for create in (make, TorchRecurrentBackend):
        pool = RecurrentPool(
            shape,
            num_layers=1,
            num_states=num_pages,
            num_row_pages=num_pages,
            page_size=page_size,
            device=device,
        )
        for tensor in tensors_of(pool):
            tensor.fill_(torch.nan)
        sides.append((create(page_size, state_table), pool))

    weight_WD = torch.randn(taps, shape.conv_width, generator=generator).to(device, dtype)
    computed = [0] * NUM_ROWS
    for counts in STEPS:
        order = sorted((i for i in range(NUM_ROWS) if counts[i]), key=lambda i: counts[i] > 1)
        lengths = [counts[i] for i in order]
        starts = [computed[i] for i in order]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        for i in order:
            computed[i] += counts[i]
        total = sum(counts)
        wide = torch.randn(total, shape.conv_width + 8, generator=generator).to(device, dtype)
        g_TN = -torch.rand(total, num_heads, generator=generator).to(device) * 0.3
        beta_TN = torch.rand(total, num_heads, generator=generator).to(device)
        plan = Plan(
            step=0, uids=order, table_idxs=order, starts=starts, ends=ends,
            token_ids=np.zeros(total, np.int32), num_decodes=lengths.count(1), sample_rows=[],
            output_idxs=[],
        )  # fmt: skip
        spans = list(zip(order, starts, ends, strict=True))
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans]).to(device)
        owners = torch.cat([torch.full((end - start,), row) for row, start, end in spans])
        slots = row_table[owners.to(device), positions // page_size] * page_size
        firsts = np.cumsum(lengths) - lengths
        outputs = []
        for backend, pool in sides:
            batch = PoolBatch(
                positions=positions.int(),
                slots=(slots + positions % page_size).int(),
                attn_metadata=backend.prepare(plan),
                context=Context(kv_pool=pool, page_table=row_table, attn=backend),
                rows=torch.tensor(
                    np.array((order, firsts, lengths, ends)), dtype=torch.int32, device=device
                ),
            )
            x_TD = wide[:, : shape.conv_width]  # of a wider projection, as the layer has it
            outputs.append(backend.forward(x_TD, g_TN, beta_TN, weight_WD, layer, batch))
        _close(*outputs, tolerance)
        for ours, theirs in zip(*(tensors_of(pool) for _, pool in sides), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan()), "other places are written"
            _close(ours.nan_to_num(), theirs.nan_to_num(), tolerance)


def _close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.dtype == theirs.dtype
    assert not theirs.isnan().any()
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"
