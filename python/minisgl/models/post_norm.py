"""Blocks that norm what attention and MLP return, before the residual addition.

Such a norm needs the whole output, so it all-reduces. Its block passes on whole outputs, and the
norms of the next block, which would all-reduce otherwise, only add and norm::

    Block          x = partial sum   norm(all_reduce(x) + residual) ...
    SandwichBlock  x = whole         norm(x + residual), attention, norm(all_reduce(...)) ...

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from minisgl.distributed import SingleRank
from minisgl.layers import (
    BaseOP,
    BuildContext,
    Identity,
    RMSNorm,
    RMSNormFused,
    StateLessOP,
)
from minisgl.models.decoder import Block

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import ModelSpec


class AllReduce(StateLessOP):
    """This rank's partial sum -> the sum."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.comm = build.comm

    def forward(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x)


class SandwichBlock(Block):
    """norm, attention, norm, add; norm, MLP, norm, add.

    norm_names: in the checkpoint, in this order. pre_norm_type, post_norm_type: of those before
    attention and MLP and after the last block, and of the others.
    """

    norm_names: ClassVar[tuple[str, str, str, str]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    pre_norm_type: ClassVar[type[RMSNormFused]] = RMSNormFused
    post_norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        # The first block gets the embedding, which is a partial sum.
        self.entry = Identity() if at.index else AllReduce(at.build)
        self.all_reduce = AllReduce(at.build)
        first, second, third, fourth = self.norm_names
        whole = replace(at, build=alone(at.build))
        self.attention_norm = whole.norm(self.pre_norm_type, first)
        self.attention_post_norm = at.norm(self.post_norm_type, second)
        self.mlp_norm = whole.norm(self.pre_norm_type, third)
        self.mlp_post_norm = at.norm(self.post_norm_type, fourth)

    @classmethod
    def final_norm(cls, spec: ModelSpec, build: BuildContext) -> RMSNormFused:
        size, eps = spec.config.hidden_size, spec.config.norm_eps
        return cls.pre_norm_type(alone(build), size=size, eps=eps, name="model.norm.weight")

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention.forward(
            self.attention_norm, self.entry.forward(x_TD), residual_TD, batch, rows_S
        )
        x_TD = self.attention_post_norm.forward(self.all_reduce.forward(x_TD))
        x_TD, residual_TD = self.mlp.forward(self.mlp_norm, x_TD, residual_TD)
        return self.mlp_post_norm.forward(self.all_reduce.forward(x_TD)), residual_TD


def alone(build: BuildContext) -> BuildContext:
    """The context of norms whose inputs are whole: nothing is all-reduced."""
    return replace(build, comm=SingleRank())


class NoNorm(RMSNormFused):
    """In the place of a norm, for a projection that takes its input as it is."""

    weight = None  # type: ignore[assignment] # `Ops.norm_linear` takes None for no norm
    eps = 0.0

    def __init__(self) -> None:
        BaseOP.__init__(self)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (x, x). There is no residual to add."""
        assert residual is None
        return x, x

    def rows(self, residual: Tensor, rows_S: Tensor, num_rows: int) -> Tensor:
        return residual[rows_S]


class PostNormBlock(SandwichBlock):
    """attention, norm, add; MLP, norm, add."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.attention_norm = self.mlp_norm = NoNorm()

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD = self.entry.forward(x_TD)
        sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
        x_TD, sum_TD = self.attention.forward(self.attention_norm, sum_TD, None, batch, rows_S)
        sum_TD = sum_TD + self.attention_post_norm.forward(self.all_reduce.forward(x_TD))
        x_TD, sum_TD = self.mlp.forward(self.mlp_norm, sum_TD, None)
        return self.mlp_post_norm.forward(self.all_reduce.forward(x_TD)), sum_TD
