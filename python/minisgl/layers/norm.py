"""RMS norm (Zhang & Sennrich 2019), alone and fused with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from minisgl.distributed import PendingSum
from minisgl.layers.base import BaseOP, BuildContext, Part


class _Norm(BaseOP):
    """Of the last axis, which has `size` elements. name: of the weight in the checkpoint."""

    weight: Tensor

    def __init__(self, build: BuildContext, *, size: int, eps: float, name: str) -> None:
        super().__init__()
        self.ops, self.eps = build.ops, eps
        self.declare("weight", build.dtype, Part.whole(name, size))


class RMSNorm(_Norm):
    """[..., size] -> the same shape, of any leading axes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class RMSNormFused(_Norm):
    """Sums x over the ranks, adds the residual, then norms: where it can, in one kernel.

    So what a block passes on is this rank's part of a sum, and a residual of which a rank may have
    its share of the rows alone (see `DistributedCommunicator.add_norm`).
    """

    def __init__(self, build: BuildContext, *, size: int, eps: float, name: str) -> None:
        super().__init__(build, size=size, eps=eps, name=name)
        self.comm = build.comm

    def forward(self, x: Tensor | PendingSum, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(sum(x) + residual), sum(x) + residual). No residual before the first block."""
        return self.comm.add_norm(self.ops, x, residual, self.weight, self.eps)

    def rows(self, residual: Tensor, rows_S: Tensor, num_rows: int) -> Tensor:
        """[S, D] of a residual that `forward` gave of `num_rows` rows."""
        return self.comm.take_rows(residual, rows_S, num_rows)
