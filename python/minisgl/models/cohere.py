"""Cohere (Command R): attention and MLP side by side on one layer norm, interleaved rotation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from minisgl.layers.norm import RMSNormFused
from minisgl.models.decoder import Block
from minisgl.models.post_norm import NoNorm
from minisgl.models.scaled import ScaledDecoder
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl.models.view import interleaved

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.layers import BuildContext
    from minisgl.models.config import ModelConfig
    from minisgl.models.decoder import LayerBuild


class LayerNormFused(RMSNormFused):
    """All-reduce x, add the residual, then layer norm (Ba et al. 2016) without a bias."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.comm.all_reduce(x)
        residual = x if residual is None else x + residual
        return F.layer_norm(residual, residual.shape[-1:], self.weight, None, self.eps), residual


class ParallelBlock(Block):
    """norm, then attention and MLP of the same input; their sum is added."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.attention_norm = at.norm(LayerNormFused, "input_layernorm")
        self.mlp_norm = NoNorm()

    @classmethod
    def final_norm(cls, spec: ModelSpec, build: BuildContext) -> RMSNormFused:
        size, eps = spec.config.hidden_size, spec.config.norm_eps
        return LayerNormFused(build, size=size, eps=eps, name="model.norm.weight")

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_norm.forward(x_TD, residual_TD)
        if rows_S is not None:
            residual_TD = self.attention_norm.rows(residual_TD, rows_S, len(x_TD))
        attended, x_TD = self.attention.forward(self.mlp_norm, x_TD, None, batch, rows_S)
        return attended + self.mlp.forward(self.mlp_norm, x_TD, None)[0], residual_TD


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    if fields.flag("use_qk_norm", False):
        raise fields.error("use_qk_norm", "false: layer norms on heads are not supported")
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=tuple(replace(layer, block=ParallelBlock) for layer in layers_of(config)),
        qkv_bias=bias,
        o_bias=bias,
        decoder=partial(ScaledDecoder, logit_scale=fields.number("logit_scale", 0.0625)),
    )


FAMILY = Family(
    architectures=("CohereForCausalLM",),
    spec=spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
    view=interleaved,
    renames={"layer_norm_eps": "rms_norm_eps"},
)
