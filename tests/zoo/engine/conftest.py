"""A tiny checkpoint, and transformers' model of it."""

from helpers.engine_fixtures import folder, reference

__all__ = ["folder", "reference"]
