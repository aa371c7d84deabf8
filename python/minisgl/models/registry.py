"""The families, by the architecture that config.json names."""

from __future__ import annotations

from minisgl.errors import UnsupportedModel
from minisgl.models import llama, mistral, mixtral, qwen2, qwen3, qwen_moe
from minisgl.models.spec import Family

_FAMILIES = {
    architecture: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        mixtral.FAMILY,
        qwen2.FAMILY,
        qwen_moe.QWEN2_MOE,
        qwen3.FAMILY,
        qwen_moe.QWEN3_MOE,
    )
    for architecture in family.architectures
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_FAMILIES))


def get_model_class(architecture: str) -> Family:
    """The family that builds `architecture`. Raises UnsupportedModel, naming those there are."""
    if architecture not in _FAMILIES:
        raise UnsupportedModel(
            f"no model family here builds {architecture!r}; supported are "
            f"{', '.join(supported_architectures())} (docs/adding-a-model.md says how to add one)"
        )
    return _FAMILIES[architecture]
