"""Norms of what attention and MLP return, in plain torch; only families with such norms import it.

`Sandwich` is to `minisgl_kernels.triton.sandwich` as `Ops` is to its twins: the specification, the
fallback and the oracle.

Axes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from minisgl import plugins
from minisgl.kernel.ops import Ops


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
