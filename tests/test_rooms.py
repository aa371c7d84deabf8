"""Each room has a row in the table of docs/architecture.md, and a place in the import contracts."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python/minisgl"
ROW = re.compile(r"^\| `(\w+)` \| [\d,]+ \| \S", re.MULTILINE)
ROOTS = {"__main__", "manifest"}  # the first starts the others, the last is data
SMALL = {"builtin"}  # a folder of files, with one function


def test_the_table_has_each_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - SMALL
    assert set(ROW.findall(page)) == rooms


def test_the_contracts_have_each_room() -> None:
    """A room that no layer names could import any other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers, host, *_ = settings["tool"]["importlinter"]["contracts"]
    named = {name for line in layers["layers"] for name in line.split(" | ")}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", *ROOTS}
    assert named == {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | modules
    assert not [name for name in host["source_modules"] if not find_spec(name)]
