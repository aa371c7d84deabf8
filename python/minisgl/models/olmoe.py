"""OLMoE: a Llama with a mixture in each layer; queries and keys are normed over all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.decoder import Block
from minisgl.models.olmo2 import wide_norms
from minisgl.models.qwen_mixture import qwen_mixture
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.layers import BuildContext, RotaryEmbedding
    from minisgl.layers.moe import MoELayer
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import LayerSpec


class OlmoeBlock(Block):
    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        build: BuildContext,
        rope: RotaryEmbedding,
        mixture: Callable[[int], MoELayer] | None,
        index: int,
        place: tuple[int, int],
    ) -> None:
        super().__init__(spec, layer, build, rope, mixture, index, place)
        self.attention.attend = wide_norms(spec, layer, build, rope, self.attention.attend.layer)


def spec(config: ModelConfig) -> ModelSpec:
    if config.fields.values.get("clip_qkv") is not None:
        raise config.fields.error("clip_qkv", "null: OLMoE was released without")
    bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=tuple(replace(layer, block=OlmoeBlock) for layer in layers_of(config)),
        qkv_bias=bias,
        o_bias=bias,
        moe=qwen_mixture(config),
    )


FAMILY = Family(
    architectures=("OlmoeForCausalLM",),
    spec=spec,
    defaults={
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 2048,
        "moe_intermediate_size": 2048,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
    renames={"intermediate_size": "moe_intermediate_size"},
)
