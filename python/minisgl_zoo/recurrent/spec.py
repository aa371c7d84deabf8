"""Recurrent layers in a spec: their sizes, cache groups and pools.

Imported only by families that have such layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from minisgl.core import Context
from minisgl.core.groups import CacheGroup
from minisgl.core.plan import MOST_DRAFTS
from minisgl.errors import ConfigError
from minisgl.layers.shard import HeadShare
from minisgl.models.spec import LayerSpec, PoolBuild, PoolSpec
from minisgl_zoo.cache_groups.groups import RowsGroup, StateGroup
from minisgl_zoo.recurrent.backend import DeltaLayer, create_recurrent_backend
from minisgl_zoo.recurrent.pool import RecurrentPool, RecurrentShape

INTERVAL = 64
"""Tokens between two states that are written (decision 0024)."""
GROUPS = (RowsGroup(interval=INTERVAL), StateGroup(interval=INTERVAL))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A gated delta net in the place of attention.

    In its `LayerSpec` num_heads counts the value heads, num_kv_heads the key heads, and head_dim is
    the size of a key. value_dim: the size of a value. taps: the length of the convolution. fused:
    see `minisgl_zoo.blocks.delta_net.FusedProjections`.
    """

    value_dim: int
    taps: int
    fused: bool

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return GROUPS

    def on_rank(self, layer: LayerSpec, heads: HeadShare, place: tuple[int, int]) -> DeltaLayer:
        """Return the constants of the layer. heads: those of this rank. place: (the layer's pool,
        its index in that pool)."""
        return DeltaLayer(
            pool=place[0],
            layer_id=place[1],
            num_heads=len(heads.q),
            num_key_heads=len(heads.kv),
            key_dim=layer.head_dim,
            value_dim=self.value_dim,
            interval=INTERVAL,
        )

    def width(self, layer: LayerSpec) -> int:
        keys, values = layer.num_kv_heads * layer.head_dim, layer.num_heads * self.value_dim
        return 2 * (keys + values + layer.num_heads)

    def pool(self, layer: LayerSpec, groups: Sequence[CacheGroup]) -> PoolSpec:
        return RecurrentPoolSpec(
            group=groups.index(GROUPS[0]),
            state_group=groups.index(GROUPS[1]),
            num_layers=0,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            value_dim=self.value_dim,
            taps=self.taps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPoolSpec(PoolSpec):
    """The pool of such layers. group, state_group: the indices of the rows' and of the states'
    cache groups. The other fields are the layers' sizes, and see `RecurrentShape`."""

    state_group: int
    num_heads: int
    value_dim: int
    taps: int
    most_false: int = 1  # without drafts, the token behind an end that was not known

    is_recurrent: ClassVar[bool] = True

    def shape(self, dtype: torch.dtype) -> RecurrentShape:
        return RecurrentShape(
            num_heads=self.num_heads,
            num_key_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.value_dim,
            taps=self.taps,
            most_false=self.most_false,
            dtype=dtype,
        )

    def with_drafts(self) -> PoolSpec:
        """See `PoolSpec.with_drafts`."""
        return replace(self, most_false=MOST_DRAFTS)

    def of_rank(self, heads: HeadShare) -> PoolSpec:
        return replace(self, num_heads=len(heads.q), num_kv_heads=len(heads.kv))

    def context(self, build: PoolBuild) -> Context:
        """See `PoolSpec.context`."""
        return Context(
            kv_pool=RecurrentPool(
                self.shape(build.dtype),
                num_layers=self.num_layers,
                num_states=build.groups[self.state_group].num_pages,
                num_row_pages=build.groups[self.group].num_pages,
                page_size=build.page_size,
                device=build.device,
            ),
            page_table=build.page_table(self.group),
            attn=create_recurrent_backend(
                build.attn,
                build.ops,
                build.device,
                build.page_size,
                build.page_table(self.state_group),
            ),
        )

    def guarded(self, layer: Any, groups: Sequence[CacheGroup]) -> list[tuple[int, Tensor]]:
        """See `PoolSpec.guarded`."""
        num_pages = groups[self.group].num_pages
        rows = (layer.inputs, layer.keys, layer.updates, layer.decays)
        return [
            (self.state_group, layer.states),
            (self.state_group, layer.tails),
            *((self.group, x.unflatten(0, (num_pages, -1))) for x in rows),
        ]

    def page_bytes(self, group: int, page_size: int, dtype: torch.dtype) -> int:
        """See `PoolSpec.page_bytes`. Raises ConfigError if a state would not be at a page's end."""
        if INTERVAL % page_size:
            raise ConfigError(
                f"--page-size {page_size}: this model has recurrent states every {INTERVAL} "
                f"tokens, which must be whole pages; use a divisor of {INTERVAL}"
            )
        shape = self.shape(dtype)
        if group == self.state_group:
            return self.num_layers * shape.state_bytes
        return self.num_layers * shape.page_bytes(page_size) if group == self.group else 0
