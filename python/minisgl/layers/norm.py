"""RMS norm (Zhang & Sennrich 2019), alone and fused with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

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
    """Adds the residual, then norms, which saves a pass over memory."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). There is no residual before the first block."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
