"""Kernels that may be emulated; the same random numbers every time."""

from helpers.kernel_fixtures import same_numbers_every_time

__all__ = ["same_numbers_every_time"]
