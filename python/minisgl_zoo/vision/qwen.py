"""Qwen3-VL, Qwen3.5 and Qwen3.6: square patches merged by two, and three positions for a token.

Qwen3-VL adds rows of inner layers of the tower to the output of its first decoder blocks
("deepstack").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from minisgl_zoo.vision.family import IdOf, Limits, Pixels, Rotation, Sizes, VisionFamily, resized

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIXELS: Final = 2**22
"""Larger pictures are made smaller. The processor's own bound is 16 million pixels, with which the
tower's activations would be the largest part of a small machine's memory."""


class Qwen3VL(VisionFamily):
    model = "Qwen3VLModel"
    towers = ("visual.",)

    @property
    def token(self) -> int:
        return int(self.config.get("image_token_id", 151655))

    @property
    def num_deep(self) -> int:
        return len(self._vision.get("deepstack_visual_indexes") or ())

    @property
    def rotation(self) -> Rotation:
        text = self.config["text_config"]
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        return Rotation(tuple(rope.get("mrope_section", (24, 20, 20))))

    def written(self, token_of: Callable[[int], str | None]) -> str:
        names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
        return "".join(token_of(int(self.config[name])) or "" for name in names)

    def process(self, processor: Any, image: Any) -> list[Pixels]:
        bounds = dict(processor.size)
        bounds["longest_edge"] = min(bounds["longest_edge"], MAX_PIXELS)
        found = resized(processor, image, size=bounds)
        _, height, width = (int(size) for size in found["image_grid_thw"][0])
        pixels = found["pixel_values"]
        # A picture's patches have equal frames: one is enough to send.
        frames = pixels.reshape(len(pixels), 3, self._frames, -1)
        return [Pixels(frames[:, :, 0].astype("uint8"), (height, width))]

    def channel_axis(self) -> int:
        return 1

    def expand(self, tiles: Sizes, id_of: IdOf) -> list[list[int]]:
        height, width = self.grid(tiles[0])
        return [[self.token] * (height * width)]

    def grid(self, sizes: tuple[int, ...]) -> tuple[int, int]:
        merge = int(self._vision.get("spatial_merge_size", 2))
        return sizes[0] // merge, sizes[1] // merge

    def limits(self, processor: Any) -> Limits:
        pixels = min(int(processor.size["longest_edge"]), MAX_PIXELS)
        patches = pixels // int(self._vision.get("patch_size", 16)) ** 2
        return Limits(patches, patches // int(self._vision.get("spatial_merge_size", 2)) ** 2)

    def features(self, model: Any, pixels: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        import torch

        patches = torch.cat(list(pixels))[:, :, None].expand(-1, -1, self._frames, -1)
        grids = torch.tensor([(1, *size) for size in sizes], device=patches.device)
        found = model.get_image_features(patches.flatten(1), image_grid_thw=grids)
        layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return [torch.cat([layer[i] for layer in layers], dim=-1) for i in range(len(sizes))]

    @property
    def _vision(self) -> dict[str, Any]:
        vision: dict[str, Any] = self.config["vision_config"]
        return vision

    @property
    def _frames(self) -> int:
        return int(self._vision.get("temporal_patch_size", 2))


class Qwen3VLMoe(Qwen3VL):
    model = "Qwen3VLMoeModel"


class Qwen35(Qwen3VL):
    model = "Qwen3_5Model"
    num_deep = 0


class Qwen35Moe(Qwen35):
    model = "Qwen3_5MoeModel"
