"""Kernels that take a token's place for its position are left out where images shift positions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from helpers import pictures
from minisgl.core.image import Image
from minisgl.engine import EngineConfig
from minisgl.engine.startup import start_engine
from minisgl.layers.rotary import RotaryEmbedding
from minisgl.message import ids_to_bytes
from minisgl_zoo.vision.family import Rotation
from minisgl_zoo.vision.turns import Turns, _ropes


def test_positions_are_not_places_behind_images(tmp_path: Path) -> None:
    for family, is_by_place in ((pictures.mistral3, True), (pictures.qwen3_vl, False)):
        sample = family(tmp_path / family.__name__)
        config = EngineConfig(model=str(sample.folder), device="cpu", num_pages=64)
        engine = start_engine(config)
        try:
            assert {rope.by_place for rope in _ropes(engine.model)} == {is_by_place}
        finally:
            engine.close()


def test_a_row_of_the_tables_forgets_the_images_of_its_last_request() -> None:
    rope = object.__new__(RotaryEmbedding)
    rope.cos_sin = torch.zeros(16, 4)
    family: Any = SimpleNamespace(rotation=Rotation((2, 1, 1)), grid=lambda sizes: sizes)
    turns = Turns(family, rope, table_rows=2, most_tokens=8)
    places = ids_to_bytes([*range(1, 7)])
    image = Image(digest=b"", places=places, token=0, shape=(), sizes=(2, 3))

    def position(images: tuple[Image, ...]) -> int:
        """Return the position of the tenth token of a request that begins in row 1."""
        plan: Any = SimpleNamespace(begins=[(1, None)], image_begins=[], images=[])
        plan.image_begins += [(1, images)] if images else []
        positions = np.array([9], np.int32)
        turns.write(plan, np.array([[1], [0], [1]], np.int32), positions)
        return int(positions[0])

    assert (position((image,)), position(())) == (6, 9)
