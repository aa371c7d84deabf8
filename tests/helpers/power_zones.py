"""Counters of a CPU's energy, as Linux shows them in files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_zone(folder: Path, name: str, label: str, microjoules: int) -> Path:
    zone = folder / name
    zone.mkdir()
    (zone / "name").write_text(f"{label}\n")
    (zone / "energy_uj").write_text(f"{microjoules}\n")
    (zone / "max_energy_range_uj").write_text("1000000\n")
    return zone


@contextmanager
def growing_zone(folder: Path) -> Iterator[None]:
    """A package's counter in the folder, which grows by a watt."""
    zone = make_zone(folder, "intel-rapl:0", "package-0", 0)
    (zone / "max_energy_range_uj").write_text("1000000000000\n")
    ended, began = threading.Event(), time.monotonic()

    def grow() -> None:
        while not ended.wait(0.005):
            new = zone / "new"
            new.write_text(f"{round((time.monotonic() - began) * 1e6)}\n")
            new.replace(zone / "energy_uj")

    thread = threading.Thread(target=grow)
    thread.start()
    yield
    ended.set()
    thread.join()
