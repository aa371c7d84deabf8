"""A container's limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.engine import cpu
from minisgl.utils import container


@pytest.mark.parametrize(
    ("cpu_max", "asked", "threads"),
    [
        ("max 100000", None, 4),
        ("250000 100000", None, 2),
        ("50000 100000", None, 1),
        ("800000 100000", None, 4),
        (None, None, 4),
        ("50000 100000", 3, 3),
        (None, 6, 6),
    ],
)
def test_threads_fit_a_containers_limit_or_are_those_asked_for(
    cpu_max: str | None,
    asked: int | None,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cpu_max:
        (tmp_path / "cpu.max").write_text(cpu_max + "\n")
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    set_to: list[int] = []
    monkeypatch.setattr(cpu.CpuDevice, "set_threads", lambda self, count: set_to.append(count))
    device = cpu.CpuDevice(1, asked)
    device.close()
    assert device.max_threads == (0 if asked else threads), "0: start-up does not choose"
    assert set_to == ([threads] if threads != 4 else [])


def test_memory_fits_a_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    assert container.container_free_bytes() == 1 << 62
    (tmp_path / "memory.current").write_text("300\n")
    for limit, free in (("max", 1 << 62), ("1000", 700), ("200", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert container.container_free_bytes() == free
