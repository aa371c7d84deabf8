"""Gemma 4's block and decoder.

Queries, keys and values are normed per head; one projection may serve as keys and as values, and
later layers may read the keys and values of an earlier one. Each layer may have its own part of the
token's embedding, and the `SandwichNorm` after a block scales its output. A mixture may run beside
the MLP: its router has its own norm, each expert a scale.

Axes: T tokens of this step, S rows that sample, D hidden size, N query heads, K key/value heads, H
head dim (all local to the rank), L layers, P width of a layer's part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from minisgl.attention import AttnLayer
from minisgl.core import Batch
from minisgl.core.batch import ImageRows
from minisgl.layers import (
    AttentionLayer,
    BuildContext,
    LinearQKVMerged,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
)
from minisgl.layers.base import BaseOP, Identity
from minisgl.layers.linear import Linear
from minisgl.layers.moe import ExpertNames, MoELayer
from minisgl.layers.shard import split_heads, times
from minisgl.models.blocks.decoder import Attention, GatedMLP, LayerBuild
from minisgl.models.blocks.mixture import MoeSpec, expert_names, read_experts
from minisgl.models.config import ModelConfig
from minisgl.models.spec import LayerSpec, ModelSpec
from minisgl.moe import Experts
from minisgl.quantization import Part
from minisgl_zoo.blocks.gemma import GemmaDecoder, UnitNorm
from minisgl_zoo.blocks.sandwich import NoNorm, SandwichBlock, SandwichNorm, without_all_reduce


class NormedValues(AttentionLayer):
    """Attention that also norms the values."""

    norms_values = True

    def __init__(
        self,
        layer: AttnLayer,
        *,
        rope: RotaryEmbedding,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        v_norm: UnitNorm,
    ) -> None:
        super().__init__(layer, rope=rope, q_norm=q_norm, k_norm=k_norm)
        self.v_norm = v_norm

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = super().split(qkv, positions_T)
        return q_TNH, k_TKH, self.v_norm.forward(v_TKH)


class ReadsAnother(AttentionLayer):
    """Attention of this layer's queries to the keys and values that another layer stores."""

    def forward(self, qkv: Tensor, batch: Batch) -> Tensor:
        view = batch.pools[self.layer.pool]
        if view.context.attn.takes_queries:
            return super().forward(qkv, batch)
        q_TNH = self.q_norm.forward(qkv.view(len(qkv), -1, self.layer.head_dim))
        q_TNH, _ = self.rope.forward(q_TNH, q_TNH[:, :1], view.positions)
        # Backends store their arguments; slot -1 makes them store nothing.
        unread_TKH = q_TNH[:, : self.layer.num_kv_heads]
        view = replace(view, slots=torch.full_like(view.slots, -1))
        attended: Tensor = view.context.attn.forward(
            q_TNH, unread_TKH, unread_TKH, self.layer, view
        )
        return attended.flatten(1)


class Gemma4Attention(Attention):
    """With the field attention_k_eq_v, layers without a window have one projection for keys and
    values."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        spec, layer, build = at.spec, at.layer, at.build
        config, prefix = spec.config, f"{layer.prefix}.self_attn"
        is_two_way = config.fields.values.get("use_bidirectional_attention") == "vision"
        attn_layer = replace(self.attend.layer, two_way=is_two_way and layer.window is not None)
        q_norm = at.head_norm(RMSNorm, "q_norm")
        if layer.shares is not None:
            # A layer that reads the keys of another projects only queries.
            self.qkv = query_projection(spec, layer, build)  # type: ignore[assignment] # has the same `forward`
            self.attend = ReadsAnother(attn_layer, rope=at.rope, q_norm=q_norm, k_norm=Identity())
            return
        if layer.window is None and config.fields.flag("attention_k_eq_v", False):
            self.qkv = LinearQKVMerged(
                build,
                in_size=config.hidden_size,
                num_q_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                bias=spec.qkv_bias,
                names=(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.k_proj"),
            )
        self.attend = NormedValues(
            attn_layer,
            rope=at.rope,
            q_norm=q_norm,
            k_norm=at.head_norm(RMSNorm, "k_norm"),
            v_norm=UnitNorm(build, size=layer.head_dim, eps=config.norm_eps),
        )


def query_projection(spec: ModelSpec, layer: LayerSpec, build: BuildContext) -> Linear:
    """Return a projection for queries only. Released files also have tensors of keys and values,
    which no layer reads; they are declared as unread."""
    prefix = f"{layer.prefix}.self_attn"
    heads = split_heads(layer.num_heads, layer.num_kv_heads, build.comm.size)[build.comm.rank]
    others = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    part = Part(
        name=f"{prefix}.q_proj.weight",
        shape=(layer.num_heads * layer.head_dim, spec.config.hidden_size),
        axis=0,
        share=times(heads.q, layer.head_dim),
        unread=tuple(f"{prefix}.{name}" for name in others),
    )
    return Linear(build, part, bias=spec.qkv_bias)


class RouterNorm(RMSNorm):
    """RMS norm that also divides by the square root of the size. The weight stays float32, so that
    there is one rounding instead of three."""

    def __init__(self, build: BuildContext, *, size: int, name: str) -> None:
        super().__init__(replace(build, dtype=torch.float32), size=size, eps=1e-6, name=name)

    def init_buffers(self, device: torch.device) -> None:
        self.weight *= self.weight.shape[0] ** -0.5


class Gemma4Experts(MoELayer):
    """A mixture whose router has its own norm, and whose experts have scales."""

    per_expert_scale: Tensor

    def __init__(
        self, build: BuildContext, *args: Any, hidden_size: int, names: ExpertNames, **options: Any
    ) -> None:
        super().__init__(build, *args, hidden_size=hidden_size, names=names, **options)
        prefix = names.router.removesuffix(".proj.weight")
        num_experts = options["num_experts"]
        self.declare(
            "per_expert_scale",
            torch.float32,
            Part.whole(f"{prefix}.per_expert_scale", num_experts),
        )
        self.router_norm = RouterNorm(build, size=hidden_size, name=f"{prefix}.scale")

    def beside(self, routed_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Route by routed_TD, the output of `router_norm`. Returns the weighted sum of this rank's
        experts, computed from x."""
        return self._backend.forward(x_TD, self.router.linear(routed_TD), self.experts)

    @property
    def experts(self) -> Experts:
        return replace(super().experts, scale=self.per_expert_scale)


def experts_beside(config: ModelConfig) -> MoeSpec | None:
    """Return the mixture that config.json describes, or None. Every layer has it."""
    if not config.fields.flag("enable_moe_block", False):
        return None
    num_experts, top_k = read_experts(config, "num_experts", "gelu_tanh")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=config.fields.integer("moe_intermediate_size"),
        renormalise=True,
        is_sparse=(True,) * config.num_layers,
        names=_names,
        activation="gelu_tanh",
        layer=Gemma4Experts,
    )


def _names(layer: int) -> ExpertNames:
    return expert_names(f"model.layers.{layer}", router="router.proj")


class LayerInput(BaseOP):
    """projection(gelu(gate(h)) * the layer's part of the embedding), on every rank.

    before: the norm that computes h from the MLP's output and the residual.
    """

    def __init__(
        self, build: BuildContext, spec: ModelSpec, prefix: str, before: SandwichNorm
    ) -> None:
        super().__init__()
        size, width = spec.config.hidden_size, _part_width(spec)
        self.ops, self.before = build.ops, before
        gate, projection = (
            f"{prefix}.per_layer_{name}.weight" for name in ("input_gate", "projection")
        )
        self.gate = build.linear(Part.whole(gate, width, size))
        self.projection = build.linear(Part.whole(projection, size, width))

    def forward(self, x_TD: Tensor, h_TD: Tensor, part_TP: Tensor) -> tuple[Tensor, Tensor]:
        """x, h: the MLP's output and the residual. Returns (output, h)."""
        gate_TP, h_TD = self.before.linear(self.gate, x_TD, h_TD)
        gated = self.ops.gated(torch.cat((gate_TP, part_TP), -1), "gelu_tanh")
        return self.projection.linear(gated), h_TD


class Gemma4Block(SandwichBlock):
    attention_type = Gemma4Attention
    mlp_norm: SandwichNorm
    factor_name, whole_embedding = "layer_scalar", True

    def __init__(self, at: LayerBuild) -> None:
        spec, layer, build = at.spec, at.layer, at.build
        fields, prefix = spec.config.fields, layer.prefix
        if layer.shares is not None and fields.flag("use_double_wide_mlp", False):
            wide = replace(spec.config, intermediate_size=2 * spec.config.intermediate_size)
            spec = replace(spec, config=wide)
            at = replace(at, spec=spec)
        super().__init__(at)
        self.experts: Gemma4Experts | None = None
        if isinstance(self.mlp, Gemma4Experts):
            self.experts, self.mlp = self.mlp, GatedMLP(spec, build, f"{prefix}.mlp")
            self.of_mlp = at.norm(RMSNorm, "post_feedforward_layernorm_1")
            self.before_experts = at.norm(RMSNorm, "pre_feedforward_layernorm_2")
            self.of_experts = at.norm(RMSNorm, "post_feedforward_layernorm_2")
            self.comm, self.no_norm = build.comm, NoNorm()
        self.layer_input: LayerInput | None = None
        if _part_width(spec):
            post = self.post_norm(spec, build, layer, self.norm_names[3])
            before = SandwichNorm(
                without_all_reduce(build) if self.experts else build, pre=None, post=post
            )
            self.layer_input = LayerInput(build, spec, prefix, before)

    @classmethod
    def entry(
        cls, spec: ModelSpec, build: BuildContext, before: LayerSpec | None, pre: RMSNorm | None
    ) -> SandwichNorm:
        is_whole = _part_width(spec) > 0 or spec.moe is not None
        return super().entry(spec, without_all_reduce(build) if is_whole else build, before, pre)

    @classmethod
    def last_name(cls, spec: ModelSpec) -> str:
        return "post_per_layer_input_norm" if _part_width(spec) else cls.norm_names[3]

    def whole(
        self,
        x_TD: Tensor,
        h_TD: Tensor | None,
        part_TP: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` with one more argument: the layer's part of the embedding, for the tokens to
        return."""
        x_TD, h_TD = self.attention.forward(self.attention_norm, x_TD, h_TD, batch, rows_S)
        if self.experts:
            x_TD, h_TD = self._mixed(self.experts, x_TD, h_TD)
        else:
            x_TD, h_TD = self.mlp.forward(self.mlp_norm, x_TD, h_TD)
        if self.layer_input and part_TP is not None:
            x_TD, h_TD = self.layer_input.forward(x_TD, h_TD, part_TP)
        return x_TD, h_TD

    def _mixed(self, experts: Gemma4Experts, x_TD: Tensor, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Run MLP and mixture side by side. Returns (their sum, whole on every rank; residual)."""
        norm = self.mlp_norm
        assert norm.pre is not None
        norms = (norm.pre, experts.router_norm, self.before_experts)
        (of_mlp, of_router, of_experts), h_TD = norm.forward_each(x_TD, h_TD, *norms)
        x_TD = self.comm.all_reduce(self.mlp.forward(self.no_norm, of_mlp, None)[0])
        mixed_TD = self.comm.all_reduce(experts.beside(of_router, of_experts))
        return norm.add(x_TD, self.of_mlp, mixed_TD, self.of_experts), h_TD


def _part_width(spec: ModelSpec) -> int:
    """The width of a layer's part of the embedding; 0 without parts."""
    return spec.config.fields.integer("hidden_size_per_layer_input", minimum=0)


class LayerEmbedding(BaseOP):
    """Computes the layers' parts, [T, L, P], from token ids and their embedding."""

    def __init__(self, build: BuildContext, spec: ModelSpec, width: int) -> None:
        super().__init__()
        config, total = spec.config, len(spec.layers) * width
        self.comm, self.width = build.comm, width
        ids = config.vocab_size  # each may be in a prompt, so the table must have it
        self.table = VocabParallelEmbedding(
            build,
            vocab_size=config.fields.integer("vocab_size_per_layer_input", ids, minimum=ids),
            hidden_size=total,
            name="model.embed_tokens_per_layer.weight",
        )
        self.table_scale = torch.tensor(width**0.5, dtype=build.dtype).item()
        name = "model.per_layer_model_projection.weight"
        self.projection = build.linear(Part.whole(name, total, config.hidden_size))
        self.projection_scale = config.hidden_size**-0.5
        name = "model.per_layer_projection_norm.weight"
        self.norm = RMSNorm(build, size=width, eps=config.norm_eps, name=name)
        self.padding = config.fields.values.get("pad_token_id") or 0

    def forward(self, ids_T: Tensor, x_TD: Tensor, images: ImageRows | None) -> Tensor:
        if images:  # their places have the part of the padding token
            ids_T = ids_T.index_fill(0, images.tokens, self.padding)
        own = self.comm.all_reduce(self.table.forward(ids_T)) * self.table_scale
        projected = self.projection.linear(x_TD) * self.projection_scale
        own_TLP, projected_TLP = (x.view(len(x), -1, self.width) for x in (own, projected))
        return (self.norm.forward(projected_TLP) + own_TLP) * 2**-0.5


class Gemma4Decoder(GemmaDecoder):
    def __init__(self, spec: ModelSpec, build: BuildContext, num_positions: int) -> None:
        softcap = spec.config.fields.optional_number("final_logit_softcapping")
        super().__init__(spec, build, num_positions, softcap)
        width = _part_width(spec)
        self.parts = LayerEmbedding(build, spec, width) if width else None

    def forward(self, batch: Batch) -> Tensor:
        images, x_TD = batch.images, self.embed(batch.input_ids)
        x_TD = self.comm.all_reduce(images.put(x_TD) if images else x_TD)
        parts_TLP = self.parts.forward(batch.input_ids, x_TD, images) if self.parts else None
        h_TD: Tensor | None = None
        blocks = cast("tuple[Gemma4Block, ...]", tuple(self.blocks))
        for index, block in enumerate(blocks):
            rows_S = None
            if block is blocks[-1] and len(batch.sample_positions) < len(x_TD):
                rows_S = batch.sample_positions
            part_TP = None if parts_TLP is None else parts_TLP[:, index]
            if part_TP is not None and rows_S is not None:
                part_TP = part_TP[rows_S]
            x_TD, h_TD = block.whole(x_TD, h_TD, part_TP, batch, rows_S)
        return self.norm.forward(x_TD, h_TD)[0]
