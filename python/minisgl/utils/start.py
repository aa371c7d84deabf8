"""Measures the time of each part of a start."""

from __future__ import annotations

import time


class StartClock:
    """The seconds of each part of a start, in order. Mutable.

    began: on `time.monotonic`, which all processes of a machine share; by default now.
    """

    def __init__(self, began: float | None = None) -> None:
        self.part_s: dict[str, float] = {}
        self._last = time.monotonic() if began is None else began

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part`."""
        now = time.monotonic()
        self.part_s[part] = self.part_s.get(part, 0.0) + now - self._last
        self._last = now

    def lap_in_parts(self, part_s: dict[str, float], rest: str) -> None:
        """Count the time since the last lap as the parts of another clock, then as `rest`."""
        self.part_s |= part_s
        self._last += sum(part_s.values())
        self.lap(rest)


def describe_start(part_s: dict[str, float]) -> str:
    """Return ``imports 1.5 s, weights 0.2 s``, of the parts that took at least 0.05 s."""
    noticed = {part: seconds for part, seconds in part_s.items() if seconds >= 0.05}
    return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in noticed.items())
