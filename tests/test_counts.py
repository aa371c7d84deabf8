"""The packages stay small: `scripts/count.py` counts lines of code, and README says the core's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts/count.py"))

CORE_LINES = 21_000
"""The core promises that one can read it, so this may only fall. It is what stood when it was last
lowered, rounded up to the next 500."""

ALL_LINES = 58_360
"""A line that leaves the core is no saving if another package gets two, so no move may raise this.
A feature may, with its lines in docs/decisions/0055-five-packages.md."""

TOUR_LINES = 2_000
"""docs/architecture.md names no more lines, so that a stranger reads them in an afternoon."""


def test_the_core_has_what_readme_says_and_all_packages_have_a_bound() -> None:
    counts = SCRIPT["count_all"]()
    lines = counts["minisgl"].lines
    says = re.search(r"the core: ([\d,]+) lines", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert says, "README.md does not say how large the core is"
    up = -(-lines // 500) * 500
    assert int(says[1].replace(",", "")) == up, f"README.md: say {up:,} (it has {lines:,})"
    assert lines <= CORE_LINES
    assert sum(count.lines for count in counts.values()) <= ALL_LINES


def test_a_line_of_code() -> None:
    text = '"""About\nit."""\n\n# why\nx = (\n    1,  # one\n)\n\ndef f():\n    """Do."""\n'
    counted = SCRIPT["count_text"](text)
    assert (counted.files, counted.lines) == (1, 4)
    assert SCRIPT["count_text"]('x = """a\n\nb"""\n').lines == 3


def test_the_tour_is_an_afternoon() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tour = page.partition("## The files of the tour")[2].partition("\n## ")[0]
    files = re.findall(r"\]\(\.\./(python/[\w/]+\.py)\)", tour)
    lines = [
        SCRIPT["count_text"]((ROOT / name).read_text(encoding="utf-8")).lines for name in files
    ]
    assert len(files) > 10
    assert sum(lines) <= TOUR_LINES
