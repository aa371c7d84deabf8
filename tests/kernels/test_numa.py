"""Memory of several nodes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minisgl_kernels.numa import online_nodes


def test_nodes_are_read_as_the_system_lists_them() -> None:
    assert online_nodes("0\n") == [0]
    assert online_nodes("0-2,5,7-8\n") == [0, 1, 2, 5, 7, 8]


INTERLEAVED = """
import mmap, sys
from pathlib import Path
from minisgl_kernels.numa import interleave
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
