"""A pool that must begin as zeros takes memory where it is written, and no sooner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.kvcache.pool import MHAKVCache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_pages", [3, 0])
def test_nothing_fills_a_zeroed_pool(
    dtype: torch.dtype, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros were written at each start, 2 GiB of them for Gemma."""
    filled: list[Any] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda shape, **more: filled.append(shape) or zeros(shape))
    pool = MHAKVCache(
        num_layers=2,
        num_pages=num_pages,
        page_size=16,
        num_kv_heads=1,
        head_dim=64,
        dtype=dtype,
        device=torch.device("cpu"),
        zeroed=True,
    )
    assert len(filled) == (0 if num_pages else 1)
    for index in range(2):
        layer = pool.layer(index)
        assert layer.k.shape == layer.v.shape == (num_pages, 16, 1, 64)
        for values in (layer.k, layer.v):
            assert not values.count_nonzero()
            values.fill_(1)
