"""Multiplies the tensors of a checkpoint by constants while they are read.

The layers of some families have constant factors. Multiplied into the weights, they cost nothing
when the model runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.models.view import CheckpointView
from minisgl.models.wrapper import text_name
from minisgl.quantization import Part


class ScaledView(CheckpointView):
    """Products are float32 and rounded to the file's dtype once."""

    def __init__(
        self, view: CheckpointView, factors: Mapping[str, float], rows: Mapping[str, Tensor]
    ) -> None:
        """factors: the end of a declared name -> the number that multiplies the tensor. rows: the
        end of a declared name -> the numbers that multiply the tensor's rows."""
        super().__init__(view.folder, text_name)
        self._factors, self._rows = factors, rows

    def share(self, name: str, part: Part) -> Tensor:
        tensor = super().share(name, part)
        factor: float | Tensor = 1.0
        for end, number in self._factors.items():
            factor = number if name.endswith(end) else factor
        for end, numbers in self._rows.items():
            if name.endswith(end):
                factor = numbers[part.share.start : part.share.stop]
                factor = factor.view(-1, *[1] * (tensor.dim() - 1)).to(tensor.device)
        if isinstance(factor, float) and factor == 1.0:
            return tensor
        return (tensor.to(torch.float32) * factor).to(tensor.dtype)
