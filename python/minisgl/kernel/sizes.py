"""Sizes that kernels are compiled for."""

from __future__ import annotations


def power_of_2(value: int) -> int:
    """The next one; 1 of 0 and 1."""
    return 1 << max(value - 1, 0).bit_length()
