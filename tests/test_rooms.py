"""The table of rooms in docs/architecture.md has each room, and its size; so have the contracts."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python/minisgl"
ROW = re.compile(r"^\| `(\w+)` \| ([\d,]+) \| \S", re.MULTILINE)
ROOTS = {"__main__", "cli"}  # they start the others
SMALL = {"builtin"}  # a folder of files, with one function
OTHER_LANGUAGES = {
    r"JavaScript, HTML and CSS: ([\d,]+) lines": ("server", "js html css"),
    r"C\+\+ and CUDA: ([\d,]+) lines": ("kernel", "cpp h cu cuh"),
}


def num_lines(room: Path, endings: str = "py") -> int:
    """Return the number of lines of its files, without other projects' in folders named vendor."""
    files = [path for path in room.rglob("*") if path.suffix[1:] in endings.split()]
    ours = [path for path in files if "vendor" not in path.parts]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in ours)


def test_the_table_has_each_room_and_its_size() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    stated = {room: int(lines.replace(",", "")) for room, lines in ROW.findall(page)}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - SMALL
    assert stated.keys() == rooms
    counts = {room: num_lines(PACKAGE / room) for room in stated}
    wrong = {room: counts[room] for room in stated if abs(counts[room] / stated[room] - 1) > 0.2}
    assert not wrong, f"write these numbers to docs/architecture.md: {wrong}"


@pytest.mark.parametrize("said", OTHER_LANGUAGES)
def test_the_table_has_the_lines_of_other_languages(said: str) -> None:
    room, endings = OTHER_LANGUAGES[said]
    [stated] = re.findall(said, (ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    count = num_lines(PACKAGE / room, endings)
    assert abs(count / int(stated.replace(",", "")) - 1) < 0.2, f"{room}: {count}"


def test_the_contracts_have_each_room() -> None:
    """A room that no layer names could import any other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers, host = settings["tool"]["importlinter"]["contracts"]
    named = {name for line in layers["layers"] for name in line.split(" | ")}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", *ROOTS}
    assert named == {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | modules
    assert not [name for name in host["source_modules"] if not find_spec(name)]
