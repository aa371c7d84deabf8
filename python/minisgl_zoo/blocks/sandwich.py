"""Blocks that norm what attention and MLP return, before the residual addition.

Such a norm needs the whole output, so the all-reduce goes before it. One `SandwichNorm` computes
all that lies between attention and MLP, or between an MLP and the next block's attention::

    Block          norm(all_reduce(x) + residual)
    SandwichBlock  pre(post(all_reduce(x)) + residual)

`Sandwich`, which it computes with, is to `minisgl_kernels.triton.sandwich` as `Ops` is to its
twins: the specification, the fallback and the oracle.

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from minisgl import plugins
from minisgl.distributed import SingleRank
from minisgl.kernel.ops import Ops
from minisgl.layers import BaseOP, BuildContext, RMSNorm, RMSNormFused
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.spec import LayerSpec, ModelSpec
from minisgl.quantization import Part


class Norm(NamedTuple):
    """The arguments of `Ops.rms_norm`."""

    weight: Tensor
    eps: float


class Sandwich:
    """Stateless. The ops return new tensors, or an argument that nothing changes.

    The sum of x and a residual, in all ops: (post(x) + residual) * factor. Each step is rounded to
    the tensors' dtype. post: the norm of x, or None. residual: None counts as zero. factor: [1], or
    None for 1.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def norm(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        post: Norm | None,
        factor: Tensor | None,
        pre: Sequence[Norm],
    ) -> tuple[list[Tensor], Tensor]:
        """Return (the sum after each norm of `pre`, the sum)."""
        x_TD = x_TD if post is None else self.ops.rms_norm(x_TD, *post)
        if len(pre) == 1 and residual_TD is not None and factor is None:
            normed_TD, total_TD = self.ops.add_rms_norm(x_TD, residual_TD, *pre[0])
            return [normed_TD], total_TD
        total_TD = x_TD if residual_TD is None else x_TD + residual_TD
        total_TD = total_TD if factor is None else total_TD * factor
        return [self.ops.rms_norm(total_TD, *norm) for norm in pre], total_TD

    def add(self, x_TD: Tensor, x_norm: Norm, y_TD: Tensor, y_norm: Norm) -> Tensor:
        """Return the sum of x and y, each after its norm."""
        return self.ops.rms_norm(x_TD, *x_norm) + self.ops.rms_norm(y_TD, *y_norm)


def create_sandwich(ops: Ops) -> Sandwich:
    """Return the norms of the device that `ops` are for."""
    sandwich: type[Sandwich] = plugins.find("ops", "sandwich", ops=ops.name) or Sandwich
    return sandwich(ops)


class SandwichNorm(RMSNormFused):
    """All-reduce x, norm it, add the residual, multiply by a factor, norm the sum.

    Every rank holds all rows of the sum. post: the norm of x. pre: the norm of the sum, for the
    next layer. Either may be None. factor: the checkpoint's name of the factor; None for 1.
    """

    in_projection = False
    factor: Tensor | None = None

    def __init__(
        self,
        build: BuildContext,
        *,
        pre: RMSNorm | None,
        post: RMSNorm | None = None,
        factor: str | None = None,
    ) -> None:
        BaseOP.__init__(self)
        self.comm, self.sandwich = build.comm, create_sandwich(build.ops)
        self.pre, self.post = pre, post
        if factor is not None:
            self.declare("factor", build.dtype, Part.whole(factor, 1))

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (the normed sum, or the sum if there is no `pre`; the sum)."""
        normed, total = self.forward_each(x, residual, *([self.pre] if self.pre else []))
        return normed[0] if normed else total, total

    def forward_each(
        self, x: Tensor, residual: Tensor | None, *pre: RMSNorm
    ) -> tuple[list[Tensor], Tensor]:
        """Do `forward` with these norms instead of `self.pre`. Returns (the sum after each norm,
        the sum)."""
        x, norms = self.comm.all_reduce(x), [Norm(norm.weight, norm.eps) for norm in pre]
        return self.sandwich.norm(x, residual, _norm(self.post), self.factor, norms)

    def add(self, x: Tensor, x_norm: RMSNorm, y: Tensor, y_norm: RMSNorm) -> Tensor:
        """Return the sum of x and y, each after its norm."""
        return self.sandwich.add(
            x, Norm(x_norm.weight, x_norm.eps), y, Norm(y_norm.weight, y_norm.eps)
        )

    def rows(self, residual: Tensor, rows_S: Tensor, num_rows: int) -> Tensor:
        return residual[rows_S]


def _norm(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else Norm(norm.weight, norm.eps)


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
