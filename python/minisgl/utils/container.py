"""The cores and the memory that a container's limits (cgroup v2) leave this process."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def container_cores() -> int:
    """Return the whole cores of the container's CPU limit, at least 1; 2**62 without a limit. With
    more threads, the time of a period would be used up early, and all would stop until its end."""
    quota, _, period = _text("cpu.max").partition(" ")
    return max(int(quota) // int(period), 1) if quota.isdigit() and period.isdigit() else 1 << 62


def container_bytes() -> int:
    """Return the container's memory limit; 2**62 without a limit."""
    limit = _text("memory.max")
    return int(limit) if limit.isdigit() else 1 << 62


def container_free_bytes() -> int:
    """Return the bytes left of the container's memory limit; 2**62 without a limit."""
    limit, used = container_bytes(), _text("memory.current")
    return max(limit - int(used), 0) if limit < 1 << 62 and used.isdigit() else limit


def _text(name: str) -> str:
    """Return the text of a file with the limits; "" if there is none."""
    path = CGROUP / name
    return path.read_text().strip() if path.is_file() else ""
