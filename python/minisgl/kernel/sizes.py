"""The sizes for which kernels are compiled."""

from __future__ import annotations


def power_of_2(value: int) -> int:
    """Return the least power of two that is at least `value`; 1 for 0."""
    return 1 << max(value - 1, 0).bit_length()
