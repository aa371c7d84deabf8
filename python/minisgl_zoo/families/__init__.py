"""Families: what config.json says, as a `ModelSpec`. A family of one row is in `plain`."""
