"""RMS norm (Zhang & Sennrich 2019): alone, and fused with the all-reduce and the residual addition
before it."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl.layers.base import BaseOP, BuildContext
from minisgl.quantization import Part, Weight


class _Norm(BaseOP):
    """Norms the last axis, of `size` elements. name: the weight's name in the checkpoint."""

    weight: Tensor

    def __init__(self, build: BuildContext, *, size: int, eps: float, name: str) -> None:
        super().__init__()
        self.ops, self.eps = build.ops, eps
        self.declare("weight", build.dtype, Part.whole(name, size))


class RMSNorm(_Norm):
    """[..., size] -> the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class RMSNormFused(_Norm):
    """All-reduce x, add the residual, then norm; in one kernel where the ops have one.

    x is this rank's partial sum. A rank may hold only its share of the residual's rows (see
    `DistributedCommunicator.add_norm`). in_projection: `Weight.norm_linear` computes this norm too.
    """

    in_projection: ClassVar[bool] = True

    def __init__(self, build: BuildContext, *, size: int, eps: float, name: str) -> None:
        super().__init__(build, size=size, eps=eps, name=name)
        self.comm = build.comm

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(s), s), where s = all_reduce(x) + residual. The first block passes no
        residual."""
        return self.comm.add_norm(self.ops, x, residual, self.weight, self.eps)

    def linear(
        self, weight: Weight, x: Tensor, residual: Tensor | None, bias: Tensor | None = None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Apply this norm, then `weight.linear`. Returns (output, residual).

        On one rank this is one op. On several ranks it is two, because the norm all-reduces x.
        """
        if self.in_projection and self.comm.size == 1:
            return weight.norm_linear(x, residual, self.weight, self.eps, bias, gate)
        x, residual = self.forward(x, residual)
        return weight.linear(x, bias, gate), residual

    def rows(self, residual: Tensor, rows_S: Tensor, num_rows: int) -> Tensor:
        """Return the rows rows_S of a residual, [S, D]. `forward` returned it for `num_rows`
        rows."""
        return self.comm.take_rows(residual, rows_S, num_rows)

    def select(
        self, rows_S: Tensor | None, residual: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the rows rows_S of the residual and of other tensors, which have all rows on each
        rank; for None the tensors themselves."""
        if rows_S is None:
            return residual, *others
        return self.rows(residual, rows_S, len(others[0])), *(x[rows_S] for x in others)
