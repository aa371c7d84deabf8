"""Blocks that norm what attention and MLP return, before the residual addition.

Such a norm needs the whole output, so the all-reduce goes before it. One `SandwichNorm` computes
all that lies between attention and MLP, or between an MLP and the next block's attention::

    Block          norm(all_reduce(x) + residual)
    SandwichBlock  pre(post(all_reduce(x)) + residual)

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from minisgl.distributed import SingleRank
from minisgl.layers import BaseOP, BuildContext, RMSNorm, RMSNormFused
from minisgl.models.decoder import Block
from minisgl_zoo.layers.sandwich import SandwichNorm

if TYPE_CHECKING:
    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import LayerSpec, ModelSpec


class SandwichBlock(Block):
    """norm, attention, norm, add; norm, MLP, norm, add.

    norm_names: the four norms' names in the checkpoint; None for a norm that is left out.
    rms_norm_type: the class of these norms. final_norm_type: the class of the model's last norm;
    None is rms_norm_type. factor_name: the name of a number that multiplies the block's output.
    whole_embedding: whether each rank has the whole embedding instead of a partial sum.
    """

    norm_names: ClassVar[tuple[str | None, str, str | None, str]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    rms_norm_type: ClassVar[type[RMSNorm]] = RMSNorm
    final_norm_type: ClassVar[type[RMSNorm] | None] = None
    factor_name: ClassVar[str | None] = None
    whole_embedding: ClassVar[bool] = False

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        spec, build, index = at.spec, at.build, at.index
        first, second, third, _ = self.norm_names
        before = spec.layers[index - 1] if index else None
        pre, mlp_pre = (
            name and self.norm_of(spec, build, f"{at.layer.prefix}.{name}")
            for name in (first, third)
        )
        self.attention_norm = self.entry(spec, build, before, pre or None)
        self.mlp_norm = SandwichNorm(
            build, pre=mlp_pre or None, post=self.post_norm(spec, build, at.layer, second)
        )

    @classmethod
    def final_norm(cls, spec: ModelSpec, build: BuildContext) -> RMSNormFused:
        pre = cls.norm_of(spec, build, "model.norm", cls.final_norm_type)
        return cls.entry(spec, build, spec.layers[-1], pre)

    @classmethod
    def entry(
        cls, spec: ModelSpec, build: BuildContext, before: LayerSpec | None, pre: RMSNorm | None
    ) -> SandwichNorm:
        """Return the norm at a block's entry: it ends the block `before` (None: it follows the
        embedding), then it applies `pre`."""
        if before is None:
            return SandwichNorm(
                without_all_reduce(build) if cls.whole_embedding else build, pre=pre
            )
        post = cls.post_norm(spec, build, before, cls.last_name(spec))
        factor = f"{before.prefix}.{cls.factor_name}" if cls.factor_name else None
        return SandwichNorm(build, pre=pre, post=post, factor=factor)

    @classmethod
    def last_name(cls, spec: ModelSpec) -> str:
        """Return the name of the last norm of a block."""
        return cls.norm_names[3]

    @classmethod
    def post_norm(
        cls, spec: ModelSpec, build: BuildContext, layer: LayerSpec, name: str
    ) -> RMSNorm:
        """Return the norm of the output of attention or MLP."""
        return cls.norm_of(spec, build, f"{layer.prefix}.{name}")

    @classmethod
    def norm_of(
        cls, spec: ModelSpec, build: BuildContext, name: str, kind: type[RMSNorm] | None = None
    ) -> RMSNorm:
        size, eps = spec.config.hidden_size, spec.config.norm_eps
        return (kind or cls.rms_norm_type)(build, size=size, eps=eps, name=f"{name}.weight")


class PostNormBlock(SandwichBlock):
    """attention, norm, add; MLP, norm, add."""

    norm_names = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def without_all_reduce(build: BuildContext) -> BuildContext:
    """Return the context for norms that all-reduce nothing, as each rank has the whole input."""
    return replace(build, comm=SingleRank())


class NoNorm(RMSNormFused):
    """Takes the place of a norm before a projection whose input is normed already."""

    in_projection = False

    def __init__(self) -> None:
        BaseOP.__init__(self)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (x, x). There must be no residual."""
        assert residual is None
        return x, x

    def rows(self, residual: Tensor, rows_S: Tensor, num_rows: int) -> Tensor:
        return residual[rows_S]
