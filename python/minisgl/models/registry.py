"""The family of each architecture. A family is imported when it is used."""

from __future__ import annotations

from minisgl import plugins
from minisgl.models.spec import Family
from minisgl_zoo.wrapper import unsupported


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(row.name for row in plugins.rows("families")))


def get_model_class(architecture: str) -> Family:
    """Return the family that builds `architecture`. Raises UnsupportedModel with the names of all
    architectures."""
    family: Family | None = plugins.find("families", architecture)
    if family is None:
        raise unsupported(architecture, supported_architectures())
    return family
