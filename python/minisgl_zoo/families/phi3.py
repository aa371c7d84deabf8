"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama with fused tensors, longrope and partial rotation.
The context is the original one (4,096 tokens) unless `--max-seq-len` asks for the long one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.view import fused

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    window = config.fields.optional_integer("sliding_window")
    return ModelSpec(config=config, layers=layers_of(config, (window,) * config.num_layers))


FAMILY = Family(
    architectures=("Phi3ForCausalLM",),
    spec=spec,
    view=fused,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
)
