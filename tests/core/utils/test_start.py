"""The times of the parts of a start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minisgl.utils import start
from minisgl.utils.start import StartClock, describe_start


def test_the_parts_add_up_to_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([103.0, 104.5, 104.5, 110.0, 116.0])
    # Threads of other tests read the real clock.
    monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: next(now)))
    clock = StartClock(began=100.0)
    for part in ("imports", "device", "weights", "device"):
        clock.lap(part)
    assert clock.part_s == {"imports": 3.0, "device": 7.0, "weights": 0.0}
    assert list(clock.part_s) == ["imports", "device", "weights"]
    assert describe_start(clock.part_s) == "imports 3.0 s, device 7.0 s"
    clock.lap_in_parts({"graphs": 4.0, "rows": 1.5}, rest="others")
    assert clock.part_s["others"] == 0.5
    assert sum(clock.part_s.values()) == 116.0 - 100.0
