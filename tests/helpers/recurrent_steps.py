"""Random steps of several requests through a backend of recurrent layers and its reference.

Prompts come in chunks, and rows decode beside them. Outputs, states, rows and the written places
are compared; places that no step wrote are NaN, and must not be read. Outputs of Mamba2 are also
compared with its recurrence in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Context, Plan, PoolBatch
from minisgl_zoo.recurrent.backend import (
    DeltaLayer,
    RecurrentBackend,
    RecurrentInputs,
    TorchRecurrentBackend,
)
from minisgl_zoo.recurrent.pool import RecurrentPool
from minisgl_zoo.recurrent.spec import RecurrentShape

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
    *,
    is_mamba: bool,
) -> None:
    """Compare a backend with its reference. make: takes page size and page table of the states.
    heads: value heads and key heads. dims: of a key and a value. tolerance: relative to the largest
    value."""
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
    bias_D = skip_N = None
    if is_mamba:
        bias_D = torch.randn(shape.conv_width, generator=generator).to(device, dtype)
        skip_N = torch.randn(num_heads, generator=generator).to(device)
    computed = [0] * NUM_ROWS
    seen: list[list[tuple[Tensor, ...]]] = [[] for _ in computed]  # of each request and step
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
            x_TD = wide[:, : shape.conv_width]  # a part of a wider projection, as in the layer
            inputs = RecurrentInputs(
                x_TD=x_TD, g_TN=g_TN, beta_TN=beta_TN, weight_WD=weight_WD, bias_D=bias_D,
                skip_N=skip_N,
            )  # fmt: skip
            outputs.append(backend.forward(inputs, layer, batch))
        parts = zip(*(x.split(lengths) for x in (x_TD, g_TN, beta_TN, *outputs)), strict=True)
        for i, part in zip(order, parts, strict=True):
            seen[i].append(part)
        _close(*outputs, tolerance)
        for ours, theirs in zip(*(tensors_of(pool) for _, pool in sides), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan()), "other places are written"
            _close(ours.nan_to_num(), theirs.nan_to_num(), tolerance)
    if bias_D is not None and skip_N is not None and dtype == torch.float32:
        for request in seen:
            x_TD, g_TN, dt_TN, *both = (torch.cat(parts) for parts in zip(*request, strict=True))
            inputs = RecurrentInputs(
                x_TD=x_TD, g_TN=g_TN, beta_TN=dt_TN, weight_WD=weight_WD, bias_D=bias_D,
                skip_N=skip_N,
            )  # fmt: skip
            expected = mamba2(inputs, layer, bias_D, skip_N)
            for out in both:
                _close(out, expected.float().to(device), 1e-5)


def mamba2(inputs: RecurrentInputs, layer: DeltaLayer, bias_D: Tensor, skip_N: Tensor) -> Tensor:
    """The recurrence of Dao & Gu (2024) for a whole sequence: h = exp(dt A) h + dt x B^T, y = C h +
    D x. x_TD has C, B and x side by side, and g_TN is dt A. Returns float64 [T, N, V]."""
    x, g, dt, weight, bias, skip = (
        y.cpu().double().numpy()
        for y in (inputs.x_TD, inputs.g_TN, inputs.beta_TN, inputs.weight_WD, bias_D, skip_N)
    )
    padded = np.concatenate([np.zeros((len(weight) - 1, x.shape[1])), x])
    mixed = sum(padded[w : w + len(x)] * taps for w, taps in enumerate(weight)) + bias
    mixed = mixed / (1 + np.exp(-mixed))
    c, b, values = np.split(mixed, np.cumsum(layer.sizes)[:2], axis=1)
    group = layer.num_heads // layer.num_key_heads
    h = np.zeros((layer.num_heads, layer.value_dim, layer.key_dim))
    out = np.empty((len(x), layer.num_heads, layer.value_dim))
    for t in range(len(x)):
        for n in range(layer.num_heads):
            own = slice(n // group * layer.key_dim, (n // group + 1) * layer.key_dim)
            value = values[t, n * layer.value_dim : (n + 1) * layer.value_dim]
            h[n] = np.exp(g[t, n]) * h[n] + dt[t, n] * np.outer(value, b[t, own])
            out[t, n] = h[n] @ c[t, own] + skip[n] * value
    return torch.from_numpy(out)


def _close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.dtype == theirs.dtype
    assert not theirs.isnan().any()
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"
