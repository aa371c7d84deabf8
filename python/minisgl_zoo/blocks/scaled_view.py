"""Multiplies the tensors of a checkpoint by constants while they are read.

The layers of some families have constant factors. Multiplied into the weights, they cost nothing
when the model runs. A quantised weight's value is (number - zero) * scale, so its scales are
multiplied. All outputs that one scale is for must have the same factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from minisgl.errors import ConfigError
from minisgl.models.view import OUTPUTS, CheckpointView
from minisgl.models.weight import DTYPES
from minisgl.models.wrapper import text_name
from minisgl.quantization import Part

SCALES: Final = ("weight_scale", "weight_scale_inv", "scales")


class ScaledView(CheckpointView):
    """Products are float32. Those of plain tensors are rounded once, to the file's dtype."""

    def __init__(
        self, view: CheckpointView, factors: Mapping[str, float], rows: Mapping[str, Tensor]
    ) -> None:
        """factors: the end of a declared name -> the number that multiplies the tensor. rows: the
        end of a declared name -> the numbers that multiply the tensor's rows. A name ends in
        .weight or .bias."""
        super().__init__(view.folder, text_name)
        self._factors, self._rows = factors, rows

    def share(self, name: str, part: Part) -> Tensor:
        """Raises ConfigError if one scale is for outputs with different factors, or if the scales
        are numbers of 8 bits."""
        tensor = super().share(name, part)
        module, _, suffix = name.rpartition(".")
        is_scale = suffix in SCALES
        kind = self.dtype(name)
        if not is_scale and kind not in DTYPES:
            return tensor  # quantised numbers, or zero points
        own = f"{module}.weight" if is_scale else name
        factor: float | Tensor = 1.0
        for end, number in self._factors.items():
            factor = number if own.endswith(end) else factor
        for end, numbers in self._rows.items():
            if own.endswith(end):
                axis = OUTPUTS[suffix]
                along = self._entries(numbers, name, axis if is_scale else 0)
                share = part.share if part.axis == axis else range(len(along))
                factor = along[share.start : share.stop].to(tensor.device)
                factor = factor.view(*[1] * axis, -1, *[1] * (tensor.dim() - axis - 1))
        if isinstance(factor, float) and factor == 1.0:
            return tensor
        if kind not in DTYPES:
            raise ConfigError(
                f"{self.folder}: {name} is {kind}, which cannot be multiplied by this family's "
                "constants; use the unquantised checkpoint, with --quantization if need be"
            )
        product = tensor.to(torch.float32) * factor
        return product if is_scale else product.to(tensor.dtype)

    def _entries(self, numbers: Tensor, name: str, axis: int) -> Tensor:
        """Return the factor of each entry along the axis of outputs. numbers: each output's
        factor."""
        shape = self.shape(name)
        count = shape[axis] if len(shape) > axis else 1
        each = 1 << (-(-len(numbers) // count) - 1).bit_length() if count > 1 else len(numbers)
        groups = torch.split(numbers, each)
        if len(groups) != count or any(bool((group != group[0]).any()) for group in groups):
            raise ConfigError(
                f"{self.folder}: {name} {list(shape)} has one entry for {each} outputs, which this "
                "family multiplies by different constants; expected a scale for each output, or a "
                "plain tensor; use the unquantised checkpoint, with --quantization if need be"
            )
        return torch.stack([group[0] for group in groups])
