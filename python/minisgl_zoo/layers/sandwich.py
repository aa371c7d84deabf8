"""One layer for three steps: the norm of an output, the residual addition, the norm of its sum.

Axes: T tokens, S rows that sample, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.layers.base import BaseOP, BuildContext
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.quantization import Part
from minisgl_zoo.layers.sandwich_ops import Norm, create_sandwich


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
