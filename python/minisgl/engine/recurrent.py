"""The pool and the backend of recurrent layers. Imported only for models that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.attention.recurrent_registry import create_recurrent_backend
from minisgl.core import Context
from minisgl.kvcache.recurrent import RecurrentPool
from minisgl.models.recurrent import RecurrentPoolSpec

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine
    from minisgl.models import PoolSpec


def recurrent_context(engine: Engine, pool: PoolSpec, attn: str) -> Context:
    """attn: the name that `--attn` gives."""
    assert isinstance(pool, RecurrentPoolSpec)
    groups, tables = engine.memory.groups, engine._tables
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
