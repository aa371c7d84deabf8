"""Cohere: attention and MLP side by side on one layer norm, interleaved rotation. Cohere 2 has
windows in three of four layers, and only those rotate. Cohere 2 (mixtures) has a mixture in all but
the first layers, whose router has softmax or sigmoids, and experts that every token takes.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from minisgl.layers import BuildContext, RMSNormFused
from minisgl.layers.moe import MoELayer
from minisgl.models.blocks.mixture import MoeSpec, names_in_mlp, read_experts
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import FULL, SLIDING, plain, types_in_config
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.layer_kinds import (
    layer_types,
    layers_of_types,
    no_rotation,
    sparse_layers,
    with_ropes,
)
from minisgl_zoo.blocks.parallel import NormedHeadsBlock, ParallelBlock
from minisgl_zoo.blocks.routers import UngatedExpert
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.blocks.views import interleaved


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    block = NormedHeadsBlock if fields.flag("use_qk_norm", False) else ParallelBlock
    return plain(
        config,
        layers=partial(layers_of, block=block),
        decoder=partial(ScaledDecoder, logit_scale=fields.number("logit_scale", 0.0625)),
    )


def spec2(config: ModelConfig) -> ModelSpec:
    types = layer_types(config, config.fields.integer("sliding_window_pattern", 4))
    layers = layers_of_types(config, types, {FULL: no_rotation(config)}, block=ParallelBlock)
    return replace(spec(config), layers=layers)


COHERE = Family(
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
COHERE2 = replace(
    COHERE,
    spec=spec2,
    defaults={**COHERE.defaults, "sliding_window": 4096, "rope_theta": 10_000.0},
)


class RMSParallelBlock(ParallelBlock):
    norm_type = RMSNormFused


class ScaledExperts(MoELayer):
    """factor: multiplies the sum of a token's experts, the shared one included."""

    def __init__(self, build: BuildContext, *args: Any, factor: float, **options: Any) -> None:
        super().__init__(build, *args, **options)
        self._factor = factor

    def forward(
        self, norm: RMSNormFused, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out_TD, residual_TD = super().forward(norm, x_TD, residual_TD)
        return out_TD * self._factor, residual_TD


class ScaledSigmoidExperts(ScaledExperts):
    """An expert's weight is the sigmoid of its logit."""

    def mix(self, x_TD: Tensor) -> Tensor:
        logits_TE = F.linear(x_TD.float(), self.router.dense().float())
        best_TK, ids_TK = logits_TE.topk(self._top_k, dim=-1)
        weights_TK = best_TK.sigmoid()
        if self._renormalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return self._backend.routed(x_TD, weights_TK, ids_TK.int(), self.experts)


ROUTERS = {"softmax": ScaledExperts, "sigmoid": ScaledSigmoidExperts}
FACTORS = {"average": 0.5, "sum": 1.0}


def spec2_moe(config: ModelConfig) -> ModelSpec:
    fields, none = config.fields, no_rotation(config)
    sparse = sparse_layers(config, fields.integer("first_k_dense_replace", 0, minimum=0))
    dense_period = fields.integer("prefix_dense_sliding_window_pattern", 1)
    types = _types(config, dense_period)
    # A layer without a window rotates only if it is dense and every dense layer is FULL by default.
    ropes = [
        config.rope if kind == SLIDING or (dense_period == 1 and not is_sparse) else none
        for kind, is_sparse in zip(types, sparse, strict=True)
    ]
    eps = fields.optional_number("rms_norm_eps")
    block = RMSParallelBlock if eps else ParallelBlock
    inner_size = fields.integer("prefix_dense_intermediate_size", config.intermediate_size)
    norm_eps = eps or fields.number("layer_norm_eps", 1e-5)
    config = replace(config, norm_eps=norm_eps, intermediate_size=inner_size)
    return replace(
        spec(config),
        layers=with_ropes(layers_of_types(config, types, block=block), ropes),
        moe=_mixture(config, sparse),
    )


def _types(config: ModelConfig, dense_period: int) -> tuple[str, ...]:
    """Return each layer's type. Without the field `layer_types`, every `dense_period`-th of the
    first, dense layers is FULL, and every `sliding_window_pattern`-th of the others."""
    fields = config.fields
    if types := types_in_config(config, (FULL, SLIDING)):
        return types
    num_dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    if num_dense > config.num_layers:
        raise fields.error("first_k_dense_replace", f"at most the {config.num_layers} layers")
    period = fields.integer("sliding_window_pattern", 4)
    counts = (dense_period, num_dense), (period, config.num_layers - num_dense)
    return tuple(
        SLIDING if (index + 1) % each else FULL for each, count in counts for index in range(count)
    )


def _mixture(config: ModelConfig, sparse: tuple[bool, ...]) -> MoeSpec:
    fields = config.fields
    num_experts, top_k = read_experts(config, "num_experts")
    inner_size = fields.integer("intermediate_size")
    num_shared = fields.integer("num_shared_experts", 0, minimum=0)
    router, sums = (
        str(fields.values[name])
        for name in ("expert_selection_fn", "shared_expert_combination_strategy")
    )
    if router not in ROUTERS:
        raise fields.error("expert_selection_fn", f"one of {', '.join(ROUTERS)}")
    if sums not in FACTORS:
        raise fields.error("shared_expert_combination_strategy", f"one of {', '.join(FACTORS)}")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=inner_size,
        renormalise=router == "softmax" or fields.flag("norm_topk_prob", True),
        is_sparse=sparse,
        names=names_in_mlp,
        layer=partial(ROUTERS[router], factor=FACTORS[sums] if num_shared else 1.0),
        shared=UngatedExpert,
        shared_size=inner_size * num_shared,
    )


COHERE2MOE = Family(
    spec=spec2_moe,
    view=COHERE.view,
    defaults={
        "tie_word_embeddings": True,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "expert_selection_fn": "softmax",
        "shared_expert_combination_strategy": "average",
    },
)
