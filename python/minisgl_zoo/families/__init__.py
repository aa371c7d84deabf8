"""Families, each a file with its `FAMILY`: what config.json says, as a `ModelSpec`."""
