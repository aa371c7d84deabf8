"""Kernels that take a token's place for its position are left out where images shift positions."""

from __future__ import annotations

from pathlib import Path

from helpers import pictures
from minisgl.engine import EngineConfig
from minisgl.engine.startup import start_engine
from minisgl_zoo.vision.turns import _ropes


def test_positions_are_not_places_behind_images(tmp_path: Path) -> None:
    for family, is_by_place in ((pictures.mistral3, True), (pictures.qwen3_vl, False)):
        sample = family(tmp_path / family.__name__)
        config = EngineConfig(model=str(sample.folder), device="cpu", num_pages=64)
        engine = start_engine(config)
        try:
            assert {rope.by_place for rope in _ropes(engine.model)} == {is_by_place}
        finally:
            engine.close()
