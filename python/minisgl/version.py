"""The version of this package, for rooms below the front doors."""

__version__ = "0.2.0"
