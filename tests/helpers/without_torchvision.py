"""Processors of transformers that need torchvision, whose wheels are bound to one build of torch.

Their own code lays out, cuts, orders and normalises; only resizing is Pillow's here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import image_processing_backends

MODULES = {
    "Lfm2VlImageProcessor": "lfm2_vl.image_processing_lfm2_vl",
    "Gemma4UnifiedImageProcessor": "gemma4_unified.image_processing_gemma4_unified",
}


class Processor:
    """Calls a processor of this class. made: the processor."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        fields = {key: each for key, each in settings.items() if not key.endswith("_type")}
        with _stand_ins():
            module: Any = import_module(f"transformers.models.{MODULES[name]}")
            self.made: Any = getattr(module, name)(**fields)

    def __call__(self, **options: Any) -> Any:
        with _stand_ins():
            return self.made(**options)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """For the time of an import or a call; other modules that it imports stay."""
    functional: Any = ModuleType("torchvision.transforms.v2.functional")
    functional.InterpolationMode = Image.Resampling
    functional.resize, functional.normalize = _resize, _normalize
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules = {name: ModuleType(name) for name in names} | {functional.__name__: functional}
    vars(modules[names[2]])["functional"] = functional
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    modes = {mode: mode for mode in Image.Resampling}
    options: dict[str, Any] = {"tvF": functional, "pil_torch_interpolation_mapping": modes}
    try:
        with patch.multiple(image_processing_backends, create=True, **options):
            yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def _resize(images: Tensor, size: Any, interpolation: Any, antialias: bool = True) -> Tensor:
    assert antialias
    height, width = size
    found = [
        np.asarray(
            Image.fromarray(each.permute(1, 2, 0).numpy()).resize((width, height), interpolation)
        )
        for each in images.reshape(-1, *images.shape[-3:])
    ]
    return (
        torch.tensor(np.stack(found)).permute(0, 3, 1, 2).reshape(*images.shape[:-2], height, width)
    )


def _normalize(images: Tensor, mean: Tensor, std: Tensor, inplace: bool = False) -> Tensor:
    return (images - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
