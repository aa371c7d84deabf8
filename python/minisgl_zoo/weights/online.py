"""`--quantization`: weights that are quantised while a plain checkpoint is read.

A scale is the largest absolute value of its unit over the largest number: fp8 has one for each
block of 128 x 128, int8 for each row (an output channel). There are no zero points (int4 has some:
`online_int4`). Each rank quantises its own share, so the blocks begin where the share begins. A
tensor is read twice, for its numbers and for its scales. `online_formats` says which weights are
quantised.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import Weight, WeightBuild
from minisgl.utils.logger import get_logger
from minisgl_zoo.weights.cut import ALL, Unit, entries, local_rows
from minisgl_zoo.weights.methods import NUMBERS
from minisgl_zoo.weights.scaled import ScaledWeight, spread

logger = get_logger(__name__)

BLOCK: Final = (128, 128)
MOST: Final = {"fp8": 448.0, "int8": 127.0}
"""The largest number of each kind."""
UNITS: Final[dict[str, Unit]] = {"fp8": BLOCK, "int8": (1, ALL)}
PIECE: Final = 1 << 15
"""Numbers that are quantised at a time. The intermediate tensors take 30 bytes for each. With whole
matrices, one in each reading thread, they took as much memory as ten layers."""

Kind = Literal["fp8", "int8"]


@dataclass(slots=True)
class Loss:
    """The time and the error of quantising the tensors of one weight. Mutable: the threads that
    read them add to it."""

    name: str
    seconds: float = 0.0
    error: float = 0.0
    total: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, values: Tensor, dequantised: Tensor, seconds: float) -> None:
        error, total = ((values - dequantised) ** 2).sum(), (values**2).sum()
        with self.lock:
            self.seconds += seconds
            self.error += float(error)
            self.total += float(total)

    @property
    def relative(self) -> float:
        """The root mean square error over that of the weights."""
        return math.sqrt(self.error / self.total) if self.total else 0.0

    def log(self) -> None:
        """Log both. Random weights have none: they are made as numbers and scales."""
        if self.total:
            logger.info(
                "quantised %s in %.2f s; root mean square error %.4f of the weights'",
                self.name,
                self.seconds,
                self.relative,
            )


class OnlineScaled(ScaledWeight):
    """A weight in fp8 or int8."""

    def __init__(self, build: WeightBuild, kind: Kind) -> None:
        Weight.__init__(self, build)
        parts, rows, stacked = build.parts, build.rows, build.stacked
        self._unit, self._rows = UNITS[kind], local_rows(parts, stacked)
        self.loss = Loss(name_of(parts))
        numbers = partial(_numbers, kind=kind, loss=self.loss)
        tensors = [replace(part, stored=torch.float32, rearrange=numbers) for part in parts]
        self.declare("tensor", NUMBERS[kind], *tensors, rows=rows, stacked=stacked)
        made = partial(_scales, kind=kind)
        scales = [replace(part, stored=torch.float32, rearrange=made) for part in parts]
        self.declare("scale", torch.float32, *scales, stacked=stacked)

    def init_buffers(self, device: torch.device) -> None:
        self.loss.log()
        super().init_buffers(device)


def name_of(parts: Sequence[Part]) -> str:
    """What the log calls a weight."""
    first = next(part.module for part in parts if part.share)
    return first if len(parts) == 1 else f"{first} and {len(parts) - 1} more"


def pieces(shape: Sequence[int], unit: Unit) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of pieces: whole units, about `PIECE` numbers together."""
    height, width = unit[0], unit[1] or max(shape[1], 1)
    columns = min(max(PIECE // (height * width), 1) * width, -(-shape[1] // width) * width)
    rows = max(PIECE // (height * max(columns, 1)), 1) * height
    for top in range(0, shape[0], rows):
        for left in range(0, shape[1], columns):
            yield slice(top, top + rows), slice(left, left + columns)


def _scales(values: Tensor, kind: Kind) -> Tensor:
    """[O, I] of any float dtype -> a scale for each unit; a unit of zeros has 1."""
    height, width = UNITS[kind][0], UNITS[kind][1] or max(values.shape[1], 1)
    scales = torch.empty(entries(values.shape, UNITS[kind]), device=values.device)
    for rows, columns in () if values.is_meta else pieces(values.shape, UNITS[kind]):
        made = _piece_scales(values[rows, columns], kind)
        top, left = rows.start // height, columns.start // width
        scales[top : top + len(made), left : left + made.shape[1]] = made
    return scales


def _piece_scales(values: Tensor, kind: Kind) -> Tensor:
    unit = UNITS[kind]
    rows, columns = entries(values.shape, unit)
    height, width = unit[0], unit[1] or values.shape[1]
    padding = (0, columns * width - values.shape[1], 0, rows * height - values.shape[0])
    padded = torch.nn.functional.pad(values.float().abs(), padding)
    scales = padded.view(rows, height, columns, width).amax((1, 3)) / MOST[kind]
    return torch.where(scales == 0, 1.0, scales)


def _ratio(values: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """A piece's values divided by their scales, and the scales, [O, I] or [O, 1]."""
    scales = spread(_piece_scales(values, kind), values.shape, [len(values)], UNITS[kind])
    return values.float() / scales, scales


def _numbers(values: Tensor, kind: Kind, loss: Loss) -> Tensor:
    """[O, I] of any float dtype -> fp8 or int8."""
    made = torch.empty(values.shape, dtype=NUMBERS[kind], device=values.device)
    for piece in () if values.is_meta else pieces(values.shape, UNITS[kind]):
        start = time.perf_counter()
        ratio, scales = _ratio(values[piece], kind)
        made[piece] = numbers = (ratio.round() if kind == "int8" else ratio).to(NUMBERS[kind])
        loss.add(values[piece].float(), numbers.float() * scales, time.perf_counter() - start)
    return made
