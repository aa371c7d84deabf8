"""Gemma 3 and 4: the tokens of an image attend to each other both ways, so they are computed whole.

In Gemma 3 they do so in all layers, and a picture is one square. In Gemma 4 only in layers with a
window, and only if the config says so; a picture keeps its ratio, and 3 x 3 patches are a place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from minisgl_zoo.vision.family import (
    IdOf,
    Limits,
    Pixels,
    Refusal,
    Sizes,
    VisionFamily,
    of_transformers,
    resized,
)

if TYPE_CHECKING:
    from torch import Tensor


class Gemma3(VisionFamily):
    model = "Gemma3Model"
    towers = ("vision_tower.", "multi_modal_projector.")
    whole = True
    around = "\n\n"

    @property
    def token(self) -> int:
        return int(self.config.get("image_token_index", 262_144))

    @property
    def mark(self) -> int:
        return int(self.config.get("boi_token_index", 255_999))

    def process(self, processor: Any, image: Any) -> list[Pixels]:
        if processor.do_pan_and_scan:
            raise Refusal("this checkpoint asks for pan and scan, with which none was released")
        [pixels] = resized(processor, image)["pixel_values"]
        return [Pixels(pixels, self._sides)]

    def expand(self, tiles: Sizes, id_of: IdOf) -> list[list[int]]:
        end = int(self.config.get("eoi_token_index", 256_000))
        return [[self.mark, *[self.token] * self._num_places, end]]

    def limits(self, processor: Any) -> Limits:
        return Limits(math.prod(self._sides), self._num_places)

    @property
    def _num_places(self) -> int:
        return int(self.config.get("mm_tokens_per_image", 256))

    @property
    def _sides(self) -> tuple[int, int]:
        vision = self.config["vision_config"]
        side = int(vision.get("image_size", 224)) // int(vision.get("patch_size", 16))
        return side, side

    def features(self, model: Any, pixels: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        import torch

        return list(model.get_image_features(torch.stack(list(pixels))).pooler_output)


class Gemma4(VisionFamily):
    model = "Gemma4Model"
    towers = ("vision_tower.", "embed_vision.")
    has_mask = True
    two_way: ClassVar[str | None] = None
    """Which tokens attend both ways, if the config says nothing."""

    @property
    def whole(self) -> bool:  # type: ignore[override] # a constant of other families
        text: dict[str, Any] = self.config["text_config"]
        return text.get("use_bidirectional_attention", self.two_way) == "vision"

    @property
    def token(self) -> int:
        return int(self.config.get("image_token_id", 258_880))

    @property
    def _area(self) -> int:
        """The patches of a place."""
        return int(self.config["vision_config"].get("pooling_kernel_size", 3)) ** 2

    def process(self, processor: Any, image: Any) -> list[Pixels]:
        found = resized(processor, image)
        [patches], [xy] = found["pixel_values"], found["image_position_ids"]
        columns, rows = (int(most) + 1 for most in xy.max(axis=0))  # padding has -1
        patches = patches[: rows * columns].reshape(rows * columns, -1, 3)
        return [Pixels(patches, (rows, columns))]

    def channel_axis(self) -> int:
        return 2

    def expand(self, tiles: Sizes, id_of: IdOf) -> list[list[int]]:
        begin = int(self.config.get("boi_token_id", 255_999))
        end = int(self.config.get("eoi_token_id", 258_882))
        return [[begin, *[self.token] * (math.prod(tiles[0]) // self._area), end]]

    def limits(self, processor: Any) -> Limits:
        most = int(processor.max_soft_tokens)
        return Limits(most * self._area, most)

    def features(self, model: Any, pixels: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        patches = pad_sequence([each.flatten(1) for each in pixels], batch_first=True)
        grids = [torch.cartesian_prod(*map(torch.arange, size)).flip(1) for size in sizes]
        xy = pad_sequence(grids, batch_first=True, padding_value=-1).to(patches.device)
        return list(model.get_image_features(patches, xy).pooler_output)


class Gemma4Unified(Gemma4):
    """The 12B model, which has no tower: a place's pixels are projected. Its processor differs from
    Gemma 4's in the order of the pixels."""

    model = "Gemma4UnifiedModel"
    towers = ("vision_embedder.", "embed_vision.")
    has_mask = False
    two_way = "vision"

    def processor(self, folder: Path) -> Any:
        plain = of_transformers("Gemma4ImageProcessorPil")
        return plain.from_pretrained(folder, local_files_only=True)

    def features(self, model: Any, pixels: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        side = math.isqrt(self._area)
        places = []
        for each, (rows, columns) in zip(pixels, sizes, strict=True):
            patch = math.isqrt(each.shape[1])
            grid = each.view(rows // side, side, columns // side, side, patch, patch, 3)
            merged = grid.permute(0, 2, 1, 4, 3, 5, 6)
            places.append(merged.reshape(-1, side * side * patch * patch, 3))
        grids = [(rows // side, columns // side) for rows, columns in sizes]
        return super().features(model, places, grids)
