"""A block whose attention and MLP read the same input, the output of one layer norm.

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor

from minisgl.layers.norm import RMSNormFused
from minisgl.models.decoder import Block
from minisgl_zoo.blocks.post_norm import NoNorm

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.models.decoder import LayerBuild


class LayerNormFused(RMSNormFused):
    """All-reduce x, add the residual, then layer norm (Ba et al. 2016) without a bias."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.comm.all_reduce(x)
        residual = x if residual is None else x + residual
        return F.layer_norm(residual, residual.shape[-1:], self.weight, None, self.eps), residual


class ParallelBlock(Block):
    """norm; attention and MLP side by side; their sum is added to the residual."""

    norm_type: ClassVar[type[RMSNormFused]] = LayerNormFused

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.mlp_norm = NoNorm()

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
        attended, x_TD = self.attention.forward(self.mlp_norm, x_TD, None, batch, rows_S)
        return attended + self.mlp.forward(self.mlp_norm, x_TD, None)[0], residual_TD
