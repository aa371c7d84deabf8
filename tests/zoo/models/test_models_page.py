"""docs/models.md is what the registry says."""

from __future__ import annotations

from pathlib import Path

from minisgl_zoo.page import page
from minisgl_zoo.wrapper import TEXT_MODELS, WRAPPERS


def test_the_page_is_generated() -> None:
    file = Path(__file__).parents[3] / "docs" / "models.md"
    assert file.read_text() == page(), "python -m minisgl_zoo.page > docs/models.md"


def test_wrappers_name_known_text_models() -> None:
    assert {kind for kinds in WRAPPERS.values() for kind in kinds} == TEXT_MODELS.keys()
