"""The README's table is what the results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.benchmark import table

README = Path(__file__).parents[2] / "README.md"


def test_readme_has_the_table_that_the_results_make() -> None:
    page = README.read_text(encoding="utf-8")
    made = table.with_table(page, table.make_table())
    assert page == made, "run python -m minisgl.benchmark table --write README.md"


def test_what_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--results", str(tmp_path)]) == 2
    assert "offline-qwen3-0.6b.json" in capsys.readouterr().err.replace("\n", "")
    page = tmp_path / "page.md"
    page.write_text("no marks")
    assert table.main(["--write", str(page)]) == 2
    assert page.read_text() == "no marks"
