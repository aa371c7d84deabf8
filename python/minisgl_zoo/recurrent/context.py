"""Builds the contexts of recurrent layers and short convolutions. Imported for models that have
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.core import Context
from minisgl_zoo.blocks.short_conv import ConvPoolSpec
from minisgl_zoo.recurrent.backends import create_recurrent_backend
from minisgl_zoo.recurrent.pool import RecurrentPool
from minisgl_zoo.recurrent.short_conv_backend import ShortConvBackend
from minisgl_zoo.recurrent.short_conv_pool import ConvPool
from minisgl_zoo.recurrent.spec import RecurrentPoolSpec

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine
    from minisgl.models import PoolSpec


def recurrent_context(engine: Engine, pool: PoolSpec, attn: str) -> Context:
    """Allocate the pool, and choose the backend of its layers. attn: the value of `--attn`."""
    groups, tables = engine.memory.groups, engine._tables
    if isinstance(pool, ConvPoolSpec):
        return Context(
            kv_pool=ConvPool(
                num_layers=pool.num_layers,
                num_pages=groups[pool.group].num_pages,
                page_size=engine.page_size,
                width=pool.width,
                dtype=engine.dtype,
                device=engine.device.torch_device,
            ),
            page_table=tables.group_table(pool.group),
            attn=ShortConvBackend(engine.page_size),
        )
    assert isinstance(pool, RecurrentPoolSpec)
    return Context(
        kv_pool=RecurrentPool(
            pool.shape(engine.dtype),
            num_layers=pool.num_layers,
            num_states=groups[pool.state_group].num_pages,
            num_row_pages=groups[pool.group].num_pages,
            page_size=engine.page_size,
            device=engine.device.torch_device,
        ),
        page_table=tables.group_table(pool.group),
        attn=create_recurrent_backend(
            attn,
            engine.device.torch_device,
            engine.page_size,
            tables.group_table(pool.state_group),
        ),
    )
