"""The table of rooms in docs/architecture.md has each room, and its size."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python/minisgl"
ROW = re.compile(r"^\| `(\w+)` \| ([\d,]+) \| \S", re.MULTILINE)
SMALL = {"builtin"}  # a folder of files, with one function


def num_lines(room: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in room.rglob("*.py"))


def test_the_table_has_each_room_and_its_size() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    told = {room: int(lines.replace(",", "")) for room, lines in ROW.findall(page)}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - SMALL
    assert told.keys() == rooms
    counts = {room: num_lines(PACKAGE / room) for room in told}
    wrong = {room: counts[room] for room in told if abs(counts[room] / told[room] - 1) > 0.2}
    assert not wrong, f"write these numbers to docs/architecture.md: {wrong}"
