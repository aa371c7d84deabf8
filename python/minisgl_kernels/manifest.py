"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

ROWS: Final[list[Row]] = []
