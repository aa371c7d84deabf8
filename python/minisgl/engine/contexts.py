"""The cache of a pool of layers, and the attention backend that reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.attention import create_attention_backend
from minisgl.core import Context
from minisgl.kvcache.pool import create_kvcache_pool
from minisgl.models import PoolBuild, PoolSpec


def create_context(
    pool: PoolSpec, build: PoolBuild, kv_dtype: torch.dtype, needs: Sequence[str]
) -> Context:
    """Allocate the pool, and choose the backend of its layers. kv_dtype: of keys and values. needs:
    see `ModelSpec.attention`."""
    if pool.is_recurrent:
        return pool.context(build)
    group = build.groups[pool.group]
    return Context(
        kv_pool=create_kvcache_pool(
            num_layers=pool.num_layers,
            num_pages=group.num_pages,
            page_size=build.page_size,
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
            dtype=kv_dtype,
            device=build.device,
            zeroed=group.kind == "window",
            values_are_keys=pool.latent is not None,
        ),
        page_table=build.page_table(pool.group),
        attn=create_attention_backend(
            build.attn,
            build.ops,
            build.device,
            dtype=kv_dtype,
            head_dim=pool.head_dim,
            latent=pool.latent,
            page_size=build.page_size,
            needs=needs,
        ),
    )
