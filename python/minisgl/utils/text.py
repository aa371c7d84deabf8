"""Writes counts and sizes for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``; for nouns that take an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size_of(num_bytes: int) -> str:
    """A number of bytes in the largest unit of KiB, MiB and GiB that it reaches."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
