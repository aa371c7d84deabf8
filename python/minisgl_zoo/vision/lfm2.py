"""LFM2-VL: SigLIP 2's tower, which takes any ratio, and tiles of large pictures.

A picture of up to twice the most places is resized to a multiple of a place. A larger one becomes a
grid of square tiles, and a thumbnail of the whole follows. Each has a pass of the tower of its own.
::

    <|image_start|><|img_row_1_col_1|><image>...<|img_row_1_col_2|><image>...
    <|img_thumbnail|><image>...<|image_end|>

transformers' processor needs torchvision (docs/decisions/0069-no-torchvision.md), so its
arithmetic is here, with Pillow's resizing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minisgl_zoo.vision.family import (
    IdOf,
    Limits,
    Pixels,
    Refusal,
    Sizes,
    VisionFamily,
    of_transformers,
)

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS: Final = {
    "do_image_splitting": True, "do_normalize": True, "do_rescale": True, "downsample_factor": 2,
    "encoder_patch_size": 16, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5),
    "max_image_tokens": 256, "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64,
    "min_tiles": 2, "resample": 2, "rescale_factor": 1 / 255, "tile_size": 512,
    "use_thumbnail": True,
}  # fmt: skip
"""What transformers' processor takes where a checkpoint says nothing."""


class Layout(SimpleNamespace):
    """The checkpoint's processor: the fields of `SETTINGS`, and how they lay a picture out."""

    @property
    def place(self) -> int:
        """The pixels of a place, along each axis."""
        return int(self.encoder_patch_size * self.downsample_factor)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of tiles of a picture."""
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            get_optimal_tiled_canvas,  # LFM2-VL's is the same
        )

        sides = (max(self.encoder_patch_size, self._rounded(side)) for side in (width, height))
        most = self.max_image_tokens * self.place**2 * self.max_pixels_tolerance
        if math.prod(sides) <= most or not self.do_image_splitting:
            return 1, 1
        tile = (self.tile_size, self.tile_size)
        columns, rows = get_optimal_tiled_canvas(
            (height, width), tile, self.min_tiles, self.max_tiles
        )
        return columns, rows

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the sides of a picture that is not cut, multiples of a place."""
        place, sides = self.place, (width, height)
        least, most = (each * place**2 for each in (self.min_image_tokens, self.max_image_tokens))
        fitted = [max(place, self._rounded(side)) for side in sides]
        if math.prod(fitted) > most:
            shrink = math.sqrt(width * height / most)
            fitted = [max(place, math.floor(side / shrink / place) * place) for side in sides]
        elif math.prod(fitted) < least:
            grow = math.sqrt(least / (width * height))
            fitted = [math.ceil(side * grow / place) * place for side in sides]
        return fitted[0], fitted[1]

    def _rounded(self, side: int) -> int:
        return round(side / self.place) * self.place


class Lfm2Vl(VisionFamily):
    model = "Lfm2VlModel"
    towers = ("vision_tower.", "multi_modal_projector.")
    has_mask = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        if config.get("model_type") != "lfm2_vl":
            raise Refusal('its files are the first ones; the later ones have model_type "lfm2_vl"')

    @property
    def token(self) -> int:
        return int(self.config.get("image_token_id", 396))

    def channel_axis(self) -> int:
        return 2

    def processor(self, folder: Path) -> Any:
        mixin = of_transformers("ImageProcessingMixin")
        given = mixin.get_image_processor_dict(folder, local_files_only=True)[0]
        return Layout(**SETTINGS | given)

    def process(self, processor: Any, image: Any) -> list[Pixels]:
        side, resample, patch = (
            getattr(processor, name) for name in ("tile_size", "resample", "encoder_patch_size")
        )
        columns, rows = processor.grid(*image.size)
        found = []
        if columns * rows > 1:
            whole = np.asarray(image.resize((columns * side, rows * side), resample))
            for row, column in np.ndindex(rows, columns):
                tile = whole[row * side :, column * side :][:side, :side]
                found.append(_patches(tile, patch, row + 1, column + 1))
        if columns * rows == 1 or processor.use_thumbnail:
            fitted = np.asarray(image.resize(processor.fitted(*image.size), resample))
            found.append(_patches(fitted, patch, 0, 0))
        return found

    def expand(self, tiles: Sizes, id_of: IdOf) -> list[list[int]]:
        found, area = [], int(self.config.get("downsample_factor", 2)) ** 2
        for height, width, row, column in tiles:
            places = [self.token] * (height * width // area)
            name = f"<|img_row_{row}_col_{column}|>" if row else "<|img_thumbnail|>"
            found.append([id_of(name), *places] if len(tiles) > 1 else places)
        found[0].insert(0, id_of("<|image_start|>"))
        found[-1].append(id_of("<|image_end|>"))
        return found

    def limits(self, processor: Any) -> Limits:
        places, fitted = (processor.tile_size // processor.place) ** 2, processor.max_image_tokens
        patches = max(places, fitted) * processor.downsample_factor**2
        return Limits(patches, processor.max_tiles * places + fitted)

    def features(self, model: Any, pixels: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        patches = pad_sequence([each.flatten(1) for each in pixels], batch_first=True)
        shapes = torch.tensor([size[:2] for size in sizes], device=patches.device)
        places = torch.arange(patches.shape[1], device=patches.device)
        mask = (places < shapes.prod(1, keepdim=True)).int()
        return list(model.get_image_features(patches, shapes, mask).pooler_output)


def _patches(image: Any, side: int, row: int, column: int) -> Pixels:
    """Cut a tile [height, width, 3] into patches [N, side * side, 3]."""
    height, width = image.shape[0] // side, image.shape[1] // side
    patches = image.reshape(height, side, width, side, 3).swapaxes(1, 2).reshape(-1, side * side, 3)
    return Pixels(patches, (height, width, row, column))
