"""Granite 3 (dense): a Llama with multipliers: for the embedding, for attention scores, for the
outputs of attention and MLP, and for the logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.models.blocks.decoder import Block
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.scaled import ScaledDecoder

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.models.blocks.decoder import LayerBuild
    from minisgl.models.config import ModelConfig


class GraniteBlock(Block):
    """A block whose attention and MLP are scaled before the residual addition."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.multiplier = at.spec.config.fields.number("residual_multiplier", 1.0)

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention.forward(
            self.attention_norm, x_TD, residual_TD, batch, rows_S
        )
        x_TD, residual_TD = self.mlp.forward(self.mlp_norm, x_TD * self.multiplier, residual_TD)
        return x_TD * self.multiplier, residual_TD


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    bias = fields.flag("attention_bias", False)
    scale = fields.number("attention_multiplier", 1.0)
    return ModelSpec(
        config=config,
        layers=layers_of(config, block=GraniteBlock, scale=scale),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        decoder=partial(
            ScaledDecoder,
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0),
        ),
    )


FAMILY = Family(
    architectures=("GraniteForCausalLM",),
    spec=spec,
    defaults={"max_position_embeddings": 2048},
)
