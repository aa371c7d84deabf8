"""The families, by the architecture in config.json. A family is imported when it is used."""

from __future__ import annotations

from importlib import import_module

from minisgl.errors import UnsupportedModel
from minisgl.models.spec import Family

_MODULES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""architecture -> the module of this package that has its `FAMILY`."""


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_MODULES))


def get_model_class(architecture: str) -> Family:
    """Returns the family that builds `architecture`. Raises UnsupportedModel with the names of
    those that there are."""
    if architecture not in _MODULES:
        raise UnsupportedModel(
            f"no model family here builds {architecture!r}; supported are "
            f"{', '.join(supported_architectures())} (docs/adding-a-model.md says how to add one)"
        )
    family = import_module(f"minisgl.models.{_MODULES[architecture]}").FAMILY
    assert isinstance(family, Family)
    return family
