"""`--quantization int4`: groups of inputs with a zero point, and a scale that is fitted to them.

::

    low                0               high       value = (number - zero) * scale
    |------------------|------------------|       numbers 0 to 15; `zero` is the number of 0
    0                 zero                15

The range of a group's values is a first scale, and a somewhat smaller one another; the largest
values then become 0 or 15. Both are improved in turns: the nearest numbers for a scale, and the
scale of least squares for these numbers. The one with less error is kept. (HQQ alternates in the
same way, Badri and Shaji 2023, but over zero points that are not integers, which the kernels of
GPUs do not read.) No data is needed. Errors are weighted by a value's size, as llama.cpp does for
its formats of 4 bits, because products with large weights matter most.

Axes: O outputs, I inputs, G groups of inputs, W inputs of a group.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import Weight, WeightBuild
from minisgl_zoo.weights.cut import local_rows
from minisgl_zoo.weights.grouped import Grouped, GroupedWeight
from minisgl_zoo.weights.online import Loss, name_of, pieces

MOST: Final = 15.0
SHRINKS: Final = (1.0, 0.9)
"""Parts of a group's range that the first scales span. The weighted error of ten matrices of two
released files is 0.0638 of the values with the first alone, 0.0624 with both, and 0.0623 with seven
from 1 to 0.7, in three times the time."""
TURNS: Final = 2
"""Of numbers and scale. That error is 0.0633 after one, 0.0624 after two, 0.0622 after three."""

Tensors = tuple[Tensor, Tensor, Tensor]
"""Of a part: packed uint8 [O, I / 2], scale [O, G], zero uint8 [O, G]."""


def group_of(ops_name: str) -> int:
    """Return the inputs of a group. A GPU's kernels hold a tile's scales and zero points in shared
    memory, where those of groups of 32 leave less room for weights."""
    return 64 if ops_name == "triton" else 32


class OnlineInt4(GroupedWeight):
    """A weight in int4."""

    def __init__(self, build: WeightBuild) -> None:
        Weight.__init__(self, build)
        parts, rows, stacked = build.parts, build.rows, build.stacked
        group = group_of(build.ops.name)
        self._kind = Grouped(spelling="gptq", bits=4, group=group, has_zero=True, act_order=False)
        self._rows = local_rows(parts, stacked)
        self._columns = next(part.local_shape[1] for part in parts if part.share)
        self.loss = Loss(name_of(parts))
        fits = [_Fit(group, self.loss) for _ in parts]
        for index, (attr, dtype) in enumerate(
            {"packed": torch.uint8, "scale": torch.bfloat16, "zero": torch.uint8}.items()
        ):
            held = [_tensor(part, fit, index) for part, fit in zip(parts, fits, strict=True)]
            self.declare(attr, dtype, *held, rows=rows, stacked=stacked)

    def init_buffers(self, device: torch.device) -> None:
        self.loss.log()
        super().init_buffers(device)


def _tensor(part: Part, fit: _Fit, index: int) -> Part:
    return replace(part, stored=torch.float32, rearrange=partial(fit.take, index=index))


class _Fit:
    """The three tensors of a part. The loader reads a part once for each, in several threads: the
    first call makes all three, and each call takes one. Mutable: those not yet taken."""

    def __init__(self, group: int, loss: Loss) -> None:
        self._group, self._loss = group, loss
        self._left: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def take(self, values: Tensor, index: int) -> Tensor:
        """values: the part, [O, I] of any float dtype. index: of `Tensors`."""
        if values.is_meta:
            return _empty(values, self._group)[index]
        with self._lock:
            if not self._left:
                self._left = dict(enumerate(quantise(values, self._group, self._loss)))
            return self._left.pop(index)


def quantise(values: Tensor, group: int, loss: Loss) -> Tensors:
    """Return the tensors of a part, [O, I] of any float dtype. The last group may be smaller."""
    packed, scale, zero = made = _empty(values, group)
    for rows, columns in pieces(values.shape, (1, group)):
        start = time.perf_counter()
        piece = values[rows, columns].float()
        width = piece.shape[1]
        groups_OGW = F.pad(piece, (0, -width % group)).view(len(piece), -1, group)
        numbers_OGW, scale_OG1, zero_OG1 = fit_groups(groups_OGW)
        dequantised = ((numbers_OGW - zero_OG1) * scale_OG1).flatten(1)[:, :width]
        numbers = F.pad(numbers_OGW.to(torch.uint8).flatten(1)[:, :width], (0, width % 2))
        left, first = columns.start // 2, columns.start // group
        pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
        packed[rows, left : left + pairs.shape[1]] = pairs
        groups = slice(first, first + scale_OG1.shape[1])
        scale[rows, groups], zero[rows, groups] = scale_OG1[..., 0], zero_OG1[..., 0]
        loss.add(piece, dequantised, time.perf_counter() - start)
    return made


def fit_groups(values_OGW: Tensor) -> Tensors:
    """Return numbers [O, G, W] of 0 to 15, scales [O, G, 1] that bfloat16 holds, and zero points
    [O, G, 1], all as float32. A group of zeros has the scale 1."""
    low_OG1 = values_OGW.amin(-1, keepdim=True).clamp(max=0)
    range_OG1 = values_OGW.amax(-1, keepdim=True).clamp(min=0) - low_OG1
    range_OG1 = torch.where(range_OG1 == 0, MOST, range_OG1)
    zero_OG1 = (-low_OG1 * (MOST / range_OG1)).round()
    weights_OGW = values_OGW.abs()
    weights_OGW += values_OGW.square().mean(-1, keepdim=True).sqrt()
    weighted_OGW = weights_OGW * values_OGW

    def numbers(scale_OG1: Tensor) -> Tensor:
        return (values_OGW / scale_OG1).add_(zero_OG1).round_().clamp_(0, MOST)

    best_OG1 = kept_OG1 = None
    for shrink in SHRINKS:
        scale_OG1 = range_OG1 * (shrink / MOST)
        for _ in range(TURNS):
            steps_OGW = numbers(scale_OG1) - zero_OG1
            fitted = (weighted_OGW * steps_OGW).sum(-1, keepdim=True)
            fitted /= (weights_OGW * steps_OGW.square()).sum(-1, keepdim=True)
            scale_OG1 = torch.where(fitted > 0, fitted, scale_OG1)
        scale_OG1 = scale_OG1.bfloat16().float()
        lost_OGW = values_OGW - (numbers(scale_OG1) - zero_OG1) * scale_OG1
        error_OG1 = (weights_OGW * lost_OGW.square_()).sum(-1, keepdim=True)
        if best_OG1 is None or kept_OG1 is None:
            best_OG1, kept_OG1 = error_OG1, scale_OG1
        else:
            kept_OG1 = torch.where(error_OG1 < best_OG1, scale_OG1, kept_OG1)
            best_OG1 = torch.minimum(error_OG1, best_OG1)
    assert kept_OG1 is not None
    return numbers(kept_OG1), kept_OG1, zero_OG1


def _empty(values: Tensor, group: int) -> Tensors:
    rows, columns = values.shape
    per_group = (rows, -(-columns // group))
    return (
        values.new_empty((rows, -(-columns // 2)), dtype=torch.uint8),
        values.new_empty(per_group, dtype=torch.float32),
        values.new_empty(per_group, dtype=torch.uint8),
    )
