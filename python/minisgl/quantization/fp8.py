"""fp8 weights (e4m3, Micikevicius et al. 2022) with one float32 scale for each checkpoint matrix.

value = weight * scale. Matrices that are merged keep their own scales::

    tensor  [O, I] fp8        |==== q ====|= k =|= v =|
    scale   [parts] float32        s_q      s_k   s_v

Activations stay in the model's dtype, so a static input scale is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import Format, Weight

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops


class Fp8Weight(Weight):
    """A checkpoint holds NAME.weight (fp8), NAME.weight_scale (a number; transformers writes
    NAME.weight_scale_inv) and, with static activations, an input scale."""

    tensor: Tensor
    scale: Tensor

    def __init__(
        self,
        ops: Ops,
        dtype: torch.dtype,
        parts: Sequence[Part],
        rows: int | None = None,
        stacked: int | None = None,
    ) -> None:
        super().__init__(ops, dtype)
        # One tensor for all experts would need one scale for each: no released format has that.
        matrices = [replace(part, stack=None) for part in parts]
        self.declare("tensor", torch.float8_e4m3fn, *matrices, rows=rows, stacked=stacked)
        self.declare("scale", torch.float32, *map(_scale, parts), stacked=stacked)
        held = [part.local_shape[0] for part in parts if part.share]
        self._rows = held[: len(held) // (stacked or 1)]

    def dense(self) -> Tensor:
        scales = [
            scale[..., None].expand(*scale.shape, rows)
            for scale, rows in zip(self.scale.unbind(-1), self._rows, strict=True)
        ]
        padding = self.tensor.shape[-2] - sum(self._rows)
        scales.append(self.scale.new_zeros(*self.scale.shape[:-1], padding))
        return (self.tensor.float() * torch.cat(scales, -1)[..., None]).to(self.dtype)


def _scale(part: Part) -> Part:
    """The scale of a matrix, whole on each rank that holds a share of the matrix."""
    return Part(
        name=f"{part.module}.weight_scale",
        alias=f"{part.module}.weight_scale_inv",
        shape=(1,),
        axis=0,
        share=range(1 if part.share else 0),
        unread=(f"{part.module}.input_scale", f"{part.module}.activation_scale"),
    )


FP8_PER_TENSOR = Format(weight=Fp8Weight)
