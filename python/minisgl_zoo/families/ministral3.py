"""Ministral 3: a Mistral with YaRN, whose queries are scaled by the logarithm of their position (as
in Llama 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention import AttnLayer
from minisgl.layers import RotaryEmbedding
from minisgl.layers.base import Identity
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.config import ModelConfig
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.attention import SplitAttentionLayer
from minisgl_zoo.blocks.layer_kinds import rope_fields, windowed_layers


def position_scale(positions_T: Tensor, beta: float, length: int) -> Tensor:
    """Return 1 + beta * log(1 + floor(p / length)) for each position p, [T, 1, 1] in float32."""
    return (1 + beta * torch.log1p((positions_T // length).float()))[:, None, None]


class ScaledQueries(SplitAttentionLayer):
    """Queries are multiplied by the `position_scale` of their position."""

    def __init__(self, layer: AttnLayer, rope: RotaryEmbedding, beta: float) -> None:
        super().__init__(layer, rope=rope, q_norm=Identity(), k_norm=Identity())
        self.beta = beta

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = super().split(qkv, positions_T)
        scale = position_scale(positions_T, self.beta, self.rope.config.original_max_position)
        return q_TNH * scale.to(q_TNH.dtype), k_TKH, v_TKH


class Ministral3Block(Block):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.attention.attend = ScaledQueries(
            self.attention.attend.layer,
            at.rope,
            beta=rope_fields(at.spec.config).number("llama_4_scaling_beta"),
        )


def spec(config: ModelConfig) -> ModelSpec:
    return ModelSpec(config=config, layers=windowed_layers(config, block=Ministral3Block))


MINISTRAL3 = Family(
    spec=spec,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
