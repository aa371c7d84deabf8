"""Mistral 3 (Mistral Small 3.1 and later, Ministral 3): Pixtral's tower, square patches merged.

A picture is read row by row: [IMG] for each merged patch, [IMG_BREAK] after each row and [IMG_END]
after the last one. Attention in the text model is causal there, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minisgl_zoo.vision.family import IdOf, Limits, Pixels, Sizes, VisionFamily, resized

if TYPE_CHECKING:
    from torch import Tensor


class Mistral3(VisionFamily):
    model = "Mistral3Model"
    towers = ("vision_tower.", "multi_modal_projector.")
    has_mask = True

    @property
    def token(self) -> int:
        return int(self.config.get("image_token_index") or self.config.get("image_token_id") or 10)

    @property
    def _patch(self) -> int:
        return int(self.config["vision_config"].get("patch_size", 14))

    @property
    def _merged(self) -> int:
        """The pixels of a place, along each axis."""
        return self._patch * int(self.config.get("spatial_merge_size", 2))

    def process(self, processor: Any, image: Any) -> list[Pixels]:
        side = {"height": self._merged, "width": self._merged}
        found = resized(processor, image, patch_size=side)
        rows, columns = (int(size) // self._patch for size in found["image_sizes"][0])
        return [Pixels(found["pixel_values"][0], (rows, columns))]

    def expand(self, tiles: Sizes, id_of: IdOf) -> list[list[int]]:
        rows, columns = (size * self._patch // self._merged for size in tiles[0])
        row = [self.token] * columns + [id_of("[IMG_BREAK]")]
        return [[*(row * rows)[:-1], id_of("[IMG_END]")]]

    def limits(self, processor: Any) -> Limits:
        side = -(-int(processor.size["longest_edge"]) // self._merged)
        return Limits((side * self._merged // self._patch) ** 2, side**2)

    def features(self, model: Any, pixels: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        import torch
        import torch.nn.functional as F

        shapes = torch.tensor([each.shape[1:] for each in pixels])
        height, width = shapes.amax(0).tolist()
        padded = [
            F.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in pixels
        ]
        found = model.get_image_features(torch.stack(padded), image_sizes=shapes)
        return list(found.pooler_output)
