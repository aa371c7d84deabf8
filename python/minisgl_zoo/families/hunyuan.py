"""Hunyuan (dense): a Llama whose queries and keys are normed per head after their rotation; files
may give a number alpha that raises the rotation's base."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.layers import AttentionLayer, RMSNorm
from minisgl.layers.base import Identity
from minisgl.models.blocks.decoder import Block
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.attention import SplitAttentionLayer
from minisgl_zoo.blocks.rotation import rope_fields

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.models.blocks.decoder import LayerBuild
    from minisgl.models.config import ModelConfig


class NormedAfterRotation(SplitAttentionLayer):
    def __init__(self, at: LayerBuild, attend: AttentionLayer) -> None:
        super().__init__(attend.layer, rope=at.rope, q_norm=Identity(), k_norm=Identity())
        self.late_q_norm = at.head_norm(RMSNorm, "query_layernorm")
        self.late_k_norm = at.head_norm(RMSNorm, "key_layernorm")

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = super().split(qkv, positions_T)
        return self.late_q_norm.forward(q_TNH), self.late_k_norm.forward(k_TKH), v_TKH


class HunyuanBlock(Block):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.attention.attend = NormedAfterRotation(at, self.attention.attend)


def spec(config: ModelConfig) -> ModelSpec:
    rope, settings = config.rope, rope_fields(config)
    if rope.rope_type == "dynamic" and settings.values.get("alpha") is not None:
        alpha = settings.number("alpha")
        if alpha > 1e6:  # 1,000 in released files
            raise settings.error("alpha", "at most 1000000")
        theta = rope.theta * alpha ** (rope.rotary_dim / (rope.rotary_dim - 2))
        config = replace(config, rope=replace(rope, rope_type="default", theta=theta, factor=1.0))
    bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of(config, block=HunyuanBlock),
        qkv_bias=bias,
        o_bias=bias,
    )


FAMILY = Family(
    architectures=("HunYuanDenseV1ForCausalLM",),
    spec=spec,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
