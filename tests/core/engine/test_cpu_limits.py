"""A container's limits, and memory of several nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl.engine import cpu
from minisgl.engine.numa import online_nodes
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


def test_cores_are_those_of_the_process_and_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dp` divides them among its servers."""
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert container.num_cores() == 8
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert container.num_cores() == 3


def test_memory_fits_a_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    assert container.container_free_bytes() == 1 << 62
    (tmp_path / "memory.current").write_text("300\n")
    for limit, free in (("max", 1 << 62), ("1000", 700), ("200", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert container.container_free_bytes() == free


def test_nodes_are_read_as_the_system_lists_them() -> None:
    assert online_nodes("0\n") == [0]
    assert online_nodes("0-2,5,7-8\n") == [0, 1, 2, 5, 7, 8]


INTERLEAVED = """
import mmap, sys
from pathlib import Path
from minisgl.engine.numa import interleave
is_done = interleave()
memory = mmap.mmap(-1, 1 << 20)
memory[0] = 1
maps = Path("/proc/self/numa_maps")
print(is_done, "interleave:" in maps.read_text() if maps.exists() else None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a system call of Linux")
def test_memory_is_interleaved_where_the_system_allows_it() -> None:
    """In a process of its own, on the nodes that are here."""
    done = subprocess.run(
        [sys.executable, "-c", INTERLEAVED], capture_output=True, text=True, check=True
    )
    is_done, is_seen = done.stdout.split()
    assert is_seen in (is_done, "None"), done.stdout + done.stderr
