"""docs/models.md names what is served."""

from __future__ import annotations

import re
from pathlib import Path

from minisgl import plugins
from minisgl_zoo.wrapper import TEXT_MODELS, WRAPPERS

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
ROWS = {line[0]: line[1:] for line in re.findall(r"^\| `(\w+)` \| (.+?) \|(.*)$", PAGE, re.M)}


def test_every_architecture_has_a_row() -> None:
    families = {row.name for row in plugins.rows("families")}
    assert ROWS.keys() == families | WRAPPERS.keys()
    for name, kinds in WRAPPERS.items():
        text, images = ROWS[name]
        assert set(re.findall(r"\w+", text)) == {TEXT_MODELS[kind] for kind in kinds}, name
        assert ("read" in images) == bool(plugins.row_of("vision", name)), name


def test_every_encoder_is_named() -> None:
    for row in plugins.rows("encoders"):
        assert f"`{row.name}`" in PAGE, row.name


def test_wrappers_name_known_text_models() -> None:
    assert {kind for kinds in WRAPPERS.values() for kind in kinds} == TEXT_MODELS.keys()
