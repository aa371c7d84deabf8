"""The C++ backend of gated short convolutions against the reference: outputs and stored inputs.

Planted once, and noticed: taps in the other order, a token's own place in each page, zeros instead
of the first input, no bias.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.core import Context, PoolBatch
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import load_library
from minisgl.kernel.ops import Ops
from minisgl_zoo.recurrent.short_conv import (
    ConvMetadata,
    ConvPool,
    CpuShortConvBackend,
    ShortConvBackend,
    create_conv_backend,
)

CPU = torch.device("cpu")
PAGE_SIZE, PAGES, WIDTH = 4, 16, 300
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Steps: (request, first position, tokens) of each row. A request's second row is a draft.
STEPS = [
    [(0, 0, 5), (1, 0, 1)],
    [(1, 1, 1), (0, 5, 1)],
    [(0, 6, 1), (1, 2, 1), (0, 7, 1)],
    [(1, 3, 1), (0, 8, 9)],
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("taps", "has_bias"), [(2, True), (3, False), (4, True)])
def test_a_backend_is_its_reference(dtype: torch.dtype, taps: int, has_bias: bool) -> None:
    random = torch.Generator().manual_seed(taps)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    weight, bias = draw(taps, WIDTH), draw(WIDTH) if has_bias else None
    table = torch.randperm(PAGES, generator=random).int().view(2, -1)
    sides: list[tuple[Any, ConvPool]] = []
    for backend in (ShortConvBackend(PAGE_SIZE), CpuShortConvBackend(load_library(), PAGE_SIZE)):
        pool = ConvPool(
            num_layers=1, num_pages=PAGES, page_size=PAGE_SIZE, width=WIDTH, dtype=dtype, device=CPU
        )
        pool.layer(0).pages.fill_(torch.nan)  # what no step wrote must not be read
        sides.append((backend, pool))
    for rows in STEPS:
        counts = [count for _, _, count in rows]
        positions = torch.cat([torch.arange(first, first + n) for _, first, n in rows])
        owners = torch.tensor([request for request, _, n in rows for _ in range(n)])
        slots = table[owners, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        firsts = [sum(counts[:index]) for index in range(len(rows))]
        fields = [(r, at, n, p + n) for (r, p, n), at in zip(rows, firsts, strict=True)]
        projected, outputs = draw(len(owners), 3 * WIDTH), []
        for backend, pool in sides:
            batch = PoolBatch(
                positions=positions.int(),
                slots=slots.int(),
                attn_metadata=ConvMetadata(has_prompts=max(counts) > 1),
                context=Context(kv_pool=pool, page_table=table, attn=backend),
                rows=torch.tensor(fields, dtype=torch.int32).T.contiguous(),
            )
            outputs.append(backend.forward(projected, weight, bias, pool.layer(0), batch).float())
        assert not outputs[0].isnan().any()
        assert (outputs[1] - outputs[0]).abs().max() <= TOLERANCE[dtype] * outputs[0].abs().max()
    stored = [pool.layer(0).pages.nan_to_num() for _, pool in sides]
    assert torch.equal(*stored)


def test_the_reference_is_for_other_devices_and_where_it_is_asked_for() -> None:
    fast = CpuOps(load_library())
    assert type(create_conv_backend("auto", fast, CPU, 4)) is CpuShortConvBackend
    assert type(create_conv_backend("torch", fast, CPU, 4)) is ShortConvBackend
    assert type(create_conv_backend("auto", Ops(), torch.device("cuda"), 4)) is ShortConvBackend
