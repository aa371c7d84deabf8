"""Kernels that may be emulated; a tiny checkpoint, and transformers' model of it."""

from helpers.engine_fixtures import folder, reference
from helpers.kernel_fixtures import same_numbers_every_time

__all__ = ["folder", "reference", "same_numbers_every_time"]
