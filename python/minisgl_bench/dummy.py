"""Random weights instead of a checkpoint's, for benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.models.loading.weight import QUANTISED, Progress, fill_parameters
from minisgl.quantization import Parameter, TensorOwner

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops

STD = 0.02
"""Hugging Face's `initializer_range`. Random activations then keep their scale over the layers."""


def load_dummy(
    model: TensorOwner,
    *,
    device: torch.device,
    ops: Ops,
    seed: int,
    progress: Progress | None,
) -> None:
    """Fill the model with random weights, which depend only on seed, shapes and device.

    So all ranks draw equal values. Two ranks are then not the same model as one rank.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def fill(parameter: Parameter) -> Tensor:
        tensor = ops.empty(parameter.shape, parameter.dtype, device)
        if parameter.dtype == torch.int32:
            return tensor.zero_()  # the group of each input, which must exist
        if parameter.dtype in (torch.int8, torch.uint8):
            return tensor.random_(0, 128, generator=generator)
        if parameter.dtype in QUANTISED:
            drawn = torch.empty(parameter.shape, device=device)
            return tensor.copy_(drawn.normal_(0, STD, generator=generator))
        if len(parameter.shape) > 1:
            return tensor.normal_(0, STD, generator=generator)
        return tensor.fill_(0 if parameter.attr == "bias" else 1)

    parameters = list(model.parameters())
    fill_parameters(model, parameters, map(fill, parameters), device, progress)
