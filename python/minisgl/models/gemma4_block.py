"""Gemma 4's block and decoder: each layer may have a part of the token's embedding of its own, and
its output is scaled.

Axes: T tokens of this step, S rows that sample, D hidden size, L layers, P width of a layer's part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from minisgl.layers import RMSNorm, VocabParallelEmbedding
from minisgl.layers.base import BaseOP, Identity
from minisgl.models.decoder import GatedMLP
from minisgl.models.gemma4_attention import Gemma4Attention
from minisgl.models.gemma4_experts import Gemma4Experts
from minisgl.models.post_norm import SandwichBlock
from minisgl.models.scaled import ScaledDecoder
from minisgl.quantization import Part

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.layers import BuildContext
    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import ModelSpec


class LayerInput(BaseOP):
    """h + norm(projection(gelu(gate(h)) * the layer's part of the embedding)), on every rank."""

    def __init__(self, build: BuildContext, spec: ModelSpec, prefix: str, width: int) -> None:
        super().__init__()
        size, self.ops = spec.config.hidden_size, build.ops
        gate, projection = (
            f"{prefix}.per_layer_{name}.weight" for name in ("input_gate", "projection")
        )
        self.gate = build.weight(Part.whole(gate, width, size))
        self.projection = build.weight(Part.whole(projection, size, width))
        name = f"{prefix}.post_per_layer_input_norm.weight"
        self.norm = RMSNorm(build, size=size, eps=spec.config.norm_eps, name=name)

    def forward(self, h_TD: Tensor, part_TP: Tensor) -> Tensor:
        gated = self.ops.gated(torch.cat((self.gate.linear(h_TD), part_TP), -1), "gelu_tanh")
        return h_TD + self.norm.forward(self.projection.linear(gated))


class Gemma4Block(SandwichBlock):
    attention_type = Gemma4Attention
    layer_scalar: Tensor

    def __init__(self, at: LayerBuild) -> None:
        spec, layer, build = at.spec, at.layer, at.build
        fields, prefix = spec.config.fields, layer.prefix
        if layer.shares is not None and fields.flag("use_double_wide_mlp", False):
            wide = replace(spec.config, intermediate_size=2 * spec.config.intermediate_size)
            spec = replace(spec, config=wide)
            at = replace(at, spec=spec)
        super().__init__(at)
        self.entry = Identity()
        self.declare("layer_scalar", build.dtype, Part.whole(f"{prefix}.layer_scalar", 1))
        width = fields.integer("hidden_size_per_layer_input", minimum=0)
        self.layer_input = LayerInput(build, spec, prefix, width) if width else None
        self.experts: Gemma4Experts | None = None
        if isinstance(self.mlp, Gemma4Experts):
            self.experts, self.mlp = self.mlp, GatedMLP(spec, build, f"{prefix}.mlp")
            self.of_mlp = at.norm(RMSNorm, "post_feedforward_layernorm_1")
            self.before_experts = at.norm(RMSNorm, "pre_feedforward_layernorm_2")
            self.of_experts = at.norm(RMSNorm, "post_feedforward_layernorm_2")

    def whole(
        self, h_TD: Tensor, part_TP: Tensor | None, batch: Batch, rows_S: Tensor | None
    ) -> Tensor:
        """Takes and returns the sum of embedding and blocks so far, on every rank; of the tokens
        rows_S, or of all. part_TP: of the tokens to return."""
        x_TD, h_TD = self.attention.forward(self.attention_norm, h_TD, None, batch, rows_S)
        h_TD = h_TD + self.attention_post_norm.forward(self.all_reduce.forward(x_TD))
        x_TD = self.all_reduce.forward(self.mlp.forward(self.mlp_norm, h_TD, None)[0])
        if self.experts:
            mixed_TD = self.experts.beside(h_TD, self.before_experts.forward(h_TD))
            mixed_TD = self.of_experts.forward(self.all_reduce.forward(mixed_TD))
            x_TD = self.of_mlp.forward(x_TD) + mixed_TD
        h_TD = h_TD + self.mlp_post_norm.forward(x_TD)
        if self.layer_input and part_TP is not None:
            h_TD = self.layer_input.forward(h_TD, part_TP)
        return h_TD * self.layer_scalar


class LayerEmbedding(BaseOP):
    """Token ids and their embedding -> the layers' parts, [T, L, P]."""

    def __init__(self, build: BuildContext, spec: ModelSpec, width: int) -> None:
        super().__init__()
        config, total = spec.config, len(spec.layers) * width
        self.comm, self.width = build.comm, width
        self.table = VocabParallelEmbedding(
            build,
            vocab_size=config.fields.integer("vocab_size_per_layer_input", config.vocab_size),
            hidden_size=total,
            name="model.embed_tokens_per_layer.weight",
        )
        self.table_scale = torch.tensor(width**0.5, dtype=build.dtype).item()
        name = "model.per_layer_model_projection.weight"
        self.projection = build.weight(Part.whole(name, total, config.hidden_size))
        self.projection_scale = config.hidden_size**-0.5
        name = "model.per_layer_projection_norm.weight"
        self.norm = RMSNorm(build, size=width, eps=config.norm_eps, name=name)

    def forward(self, ids_T: Tensor, x_TD: Tensor) -> Tensor:
        own = self.comm.all_reduce(self.table.forward(ids_T)) * self.table_scale
        projected = self.projection.linear(x_TD) * self.projection_scale
        own_TLP, projected_TLP = (x.view(len(x), -1, self.width) for x in (own, projected))
        return (self.norm.forward(projected_TLP) + own_TLP) * 2**-0.5


class Gemma4Decoder(ScaledDecoder):
    def __init__(self, spec: ModelSpec, build: BuildContext, num_positions: int) -> None:
        fields, hidden_size = spec.config.fields, spec.config.hidden_size
        softcap = fields.optional_number("final_logit_softcapping")
        scale = hidden_size**0.5
        super().__init__(spec, build, num_positions, embedding_scale=scale, softcap=softcap)
        width = fields.integer("hidden_size_per_layer_input", minimum=0)
        self.parts = LayerEmbedding(build, spec, width) if width else None

    def forward(self, batch: Batch) -> Tensor:
        h_TD = self.comm.all_reduce(self.embed(batch.input_ids))
        parts_TLP = self.parts.forward(batch.input_ids, h_TD) if self.parts else None
        blocks = cast("tuple[Gemma4Block, ...]", tuple(self.blocks))
        for index, block in enumerate(blocks):
            rows_S = None
            if block is blocks[-1] and len(batch.sample_positions) < len(h_TD):
                rows_S = batch.sample_positions
            part_TP = None if parts_TLP is None else parts_TLP[:, index]
            if part_TP is not None and rows_S is not None:
                part_TP = part_TP[rows_S]
            h_TD = block.whole(h_TD, part_TP, batch, rows_S)
        return self.norm.forward(h_TD, None)[0]
