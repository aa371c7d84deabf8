"""Layers that only families of this package have."""
