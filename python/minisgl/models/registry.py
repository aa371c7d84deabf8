"""The family of each architecture. A family is imported when it is used."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from minisgl import plugins
from minisgl.errors import UnsupportedModel
from minisgl.models.spec import Family, ModelSpec

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(row.name for row in plugins.rows("families")))


def get_model_class(architecture: str) -> Family:
    """Return the family that builds `architecture`. Raises UnsupportedModel with the names of all
    architectures, or of all encoders if it is called like one; if most families are absent, it
    names the package that has them."""
    family: Family | None = plugins.find("families", architecture)
    family = family or plugins.find("encoders", architecture)
    if family is not None:
        return family
    names, known = supported_architectures(), "supported are"
    if not any(part in architecture for part in ("LM", "Generation")):
        encoders = tuple(row.name for row in plugins.rows("encoders"))
        names, known = (encoders, "encoders here are") if encoders else (names, known)
    nearest = "".join(
        f"; did you mean {name}?" for name in get_close_matches(architecture, names, 1)
    )
    more = f"; any other {plugins.absent('families')}" if plugins.lacks("families") else ""
    raise UnsupportedModel(
        f"no model family here builds {architecture!r}; {known} {', '.join(names)}{more}"
        f"{nearest} (docs/extending.md says how to add one)"
    )


def spec_of(config: ModelConfig) -> ModelSpec:
    """Return the decoder of a config.json. Raises ConfigError if the family refuses it."""
    return get_model_class(config.architecture).spec(config)
