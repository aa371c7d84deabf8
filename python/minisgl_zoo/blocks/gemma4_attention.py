"""Gemma 4's attention: queries, keys and values are normed per head. One projection may serve as
keys and as values, and later layers may read the keys and values of an earlier one.

Axes: T tokens, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minisgl.attention import AttnLayer
from minisgl.core import Batch
from minisgl.layers import AttentionLayer, BuildContext, LinearQKVMerged, RMSNorm, RotaryEmbedding
from minisgl.layers.base import BaseOP, Identity
from minisgl.layers.linear import Linear
from minisgl.layers.shard import split_heads, times
from minisgl.models.blocks.decoder import Attention, LayerBuild
from minisgl.models.spec import LayerSpec, ModelSpec
from minisgl.quantization import Part


class UnitNorm(RMSNorm):
    """RMS norm without a weight."""

    def __init__(self, build: BuildContext, *, size: int, eps: float) -> None:
        BaseOP.__init__(self)
        self.ops, self.eps = build.ops, eps
        self.weight = torch.empty(size, dtype=build.dtype, device="meta")

    def init_buffers(self, device: torch.device) -> None:
        self.weight = torch.ones(self.weight.shape, dtype=self.weight.dtype, device=device)

    @property
    def num_buffer_bytes(self) -> int:
        return self.weight.nbytes


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
        attn_layer = self.attend.layer
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
