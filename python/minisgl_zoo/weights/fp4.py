"""Numbers of 4 bits (fp4 e2m1), two in a byte, with a scale for each group of inputs.

MXFP4 (OCP Microscaling Formats, 2023) has groups of 32 and scales that are powers of two; NVFP4 has
groups of 16, fp8 (e4m3) scales and a float32 scale for each matrix::

    packed  [O, I / 2] uint8        the number of the even column in the low bits
    scale   [O, I / group]          uint8 is an exponent + 127; or fp8
    matrix_scale  [matrices]        float32, only NVFP4

value = number * scale * matrix scale. Activations stay in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from minisgl.errors import ConfigError
from minisgl.kernel.cpu import CpuOps
from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import WeightBuild
from minisgl_zoo.weights.cut import ALL, local_rows, per_unit
from minisgl_zoo.weights.panels import (
    Panels,
    pack_nibbles,
    pack_rows,
    takes,
    unpack_nibbles,
    unpack_rows,
)
from minisgl_zoo.weights.quantised import Packed, QuantisedWeight
from minisgl_zoo.weights.scaled import UNREAD, spread

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values without their sign, which is the highest of the four bits."""
MX_GROUP, NV_GROUP = 32, 16

Spelling = Literal["gpt-oss", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "modelopt"]
"""How a file stores the tensors. The two in the middle are formats of compressed-tensors; the first
two are MXFP4, the others NVFP4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4:
    """Makes the weights of this format."""

    spelling: Spelling

    @property
    def is_mx(self) -> bool:
        """Whether it is MXFP4, not NVFP4."""
        return self.spelling in ("gpt-oss", "mxfp4-pack-quantized")

    @property
    def group(self) -> int:
        """The inputs that have a common scale."""
        return MX_GROUP if self.is_mx else NV_GROUP

    def __call__(self, build: WeightBuild) -> Fp4Weight:
        return Fp4Weight(build, self)


class Fp4Weight(QuantisedWeight):
    """A checkpoint holds, by spelling:

    - gpt-oss: STACK_blocks [E, O, I / 32, 16] and STACK_scales [E, O, I / 32], uint8, of all
      experts. STACK is the name of `Part.stack`, whose shape is [E, O, I].
    - mxfp4-pack-quantized: NAME.weight_packed, NAME.weight_scale.
    - nvfp4-pack-quantized: these and NAME.weight_global_scale, by which the values are divided.
    - modelopt: NAME.weight, NAME.weight_scale, NAME.weight_scale_2.
    """

    packed: Tensor
    scale: Tensor
    matrix_scale: Tensor | None = None

    def __init__(self, build: WeightBuild, kind: Fp4) -> None:
        super().__init__(build)
        parts, rows, stacked = build.parts, build.rows, build.stacked
        group = kind.group
        self._group, self._rows = group, local_rows(parts, stacked)
        if parts[0].shape[1] % group:
            raise ConfigError(
                f"{parts[0].module} has {parts[0].shape[1]} inputs, but its format has groups of "
                f"{group}; expected a multiple"
            )
        if kind.spelling == "gpt-oss":
            packed = [_of_stack(part, "blocks", MX_GROUP // 2) for part in parts]
            scales = [_of_stack(part, "scales") for part in parts]
        else:
            is_modelopt = kind.spelling == "modelopt"
            name = "weight" if is_modelopt else "weight_packed"
            packed = [per_unit(part, name, (1, 2)) for part in parts]
            scales = [per_unit(part, "weight_scale", (1, group)) for part in parts]
        if not kind.is_mx:
            name = "weight_scale_2" if is_modelopt else "weight_global_scale"
            matrix_scales = [
                per_unit(
                    part,
                    name,
                    (ALL, ALL),
                    flat=True,
                    unread=(*UNREAD, "input_global_scale"),
                    stored=torch.float32,
                    rearrange=None if is_modelopt else torch.reciprocal,
                )
                for part in parts
            ]
            self.declare("matrix_scale", torch.float32, *matrix_scales, stacked=stacked)
        scale_dtype = torch.uint8 if kind.is_mx else torch.float8_e4m3fn
        self.declare("packed", torch.uint8, *packed, rows=rows, stacked=stacked)
        self.declare("scale", scale_dtype, *scales, rows=rows, stacked=stacked)

    def init_buffers(self, device: torch.device) -> None:
        self._values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)
        super().init_buffers(device)

    @property
    def num_buffer_bytes(self) -> int:
        return 2 * len(E2M1) * torch.float32.itemsize

    def dense(self) -> Tensor:
        packed, scale = self.packed, self.scale
        if self.panels:
            packed, scale = unpack_nibbles(packed, offset=0), unpack_rows(scale)
        numbers = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        values = self._values[numbers.int()].view(*scale.shape, self._group)
        if scale.dtype == torch.uint8:
            values = torch.ldexp(values, scale.int()[..., None] - 127)
        else:
            values = values * scale.float()[..., None]
        values = values.flatten(-2)
        if self.matrix_scale is not None:
            values = values * spread(self.matrix_scale, values.shape, self._rows, (ALL, ALL))
        dense: Tensor = values.to(self.dtype)
        return dense

    def packed_form(self) -> Packed | None:
        if self.scale.dtype == torch.uint8 and self.dtype != torch.bfloat16:
            return None  # float16 has fewer exponents
        outer = None
        if self.matrix_scale is not None:
            shape = (*self.scale.shape[:-1], 1)
            outer = spread(self.matrix_scale, shape, self._rows, (ALL, ALL))[..., 0].contiguous()
        numbers = self.packed.view(torch.int32)
        return Packed(kind="fp4", numbers=numbers, group=self._group, scale=self.scale, outer=outer)

    def pack(self, ops: CpuOps) -> Panels | None:
        outputs, inputs = self.packed.shape[-2], 2 * self.packed.shape[-1]
        if self.matrix_scale is not None or not takes(
            outputs, inputs, self._group, self.dtype, "fp4"
        ):
            return None
        pack_nibbles(ops, self.packed, offset=0)
        pack_rows(ops, self.scale)
        return Panels(
            kind="fp4", numbers=self.packed, group=self._group, scales=self.scale, zeros=None,
            middle=0, outputs=outputs, inputs=inputs,
        )  # fmt: skip


def _of_stack(part: Part, kind: str, *group: int) -> Part:
    """The share of tensor STACK_`kind` that goes with an expert's `part`. group: bytes of a
    group."""
    assert part.stack, f"{part.name} is in no stack of experts"
    share = per_unit(part, kind, (1, MX_GROUP))
    count, out_size, _ = part.stack.shape
    groups = share.shape[1]
    return replace(
        share,
        name=f"{part.module}_{kind}",
        shape=(*share.shape, *group),
        stack=replace(
            part.stack,
            name=f"{part.stack.name}_{kind}",
            shape=(count, out_size, groups, *group),
        ),
        rearrange=(lambda blocks: blocks.flatten(1)) if group else None,  # to bytes of a row
        stored=torch.uint8,
    )
