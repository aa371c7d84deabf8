"""Falcon-H1's block: Mamba2 and attention with the same input.

Both have a cache, so a layer of the file is two layers of the spec: `SidePlace` has Mamba2's cache,
and `SideBlock` after it computes both.

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.layers import BaseOP
from minisgl.models.blocks.decoder import Block
from minisgl.models.spec import CacheLayout
from minisgl_zoo.blocks.mamba2 import mixer
from minisgl_zoo.blocks.sandwich import NoNorm

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Batch
    from minisgl.models.blocks.decoder import LayerBuild


class SidePlace(Block):
    """Holds the place of the next block's Mamba2 in the cache. `forward` returns its arguments."""

    def __init__(self, at: LayerBuild) -> None:
        BaseOP.__init__(self)

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return x_TD, residual_TD  # type: ignore[return-value] # None before the first norm


class SideBlock(Block):
    """norm; Mamba2 and attention side by side, whose sum is added; norm, MLP."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        before = at.index - 1
        place = CacheLayout.of(at.spec.layers).places[before]
        self.mamba = mixer(replace(at, layer=at.spec.layers[before], place=place), "mamba")
        self.no_norm = NoNorm()

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_norm.forward(x_TD, residual_TD)
        if rows_S is not None:
            residual_TD = self.attention_norm.rows(residual_TD, rows_S, len(x_TD))
        mixed, _ = self.mamba.forward(self.no_norm, x_TD, None, batch, rows_S)
        attended, _ = self.attention.forward(self.no_norm, x_TD, None, batch, rows_S)
        return self.mlp.forward(self.mlp_norm, mixed + attended, residual_TD)
