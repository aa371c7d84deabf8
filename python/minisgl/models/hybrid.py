"""The layers of Qwen's hybrids: most have a gated delta net, the others attention with a gate.

Norms multiply by 1 + the checkpoint's weight.

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.kernel.gates import create_gates
from minisgl.layers import RMSNormFused
from minisgl.layers.delta_net import FusedProjections, GatedDeltaNet, Projections
from minisgl.layers.gated_attention import LinearGatedQKV
from minisgl.models.decoder import Attention, Block
from minisgl.models.gemma import GemmaNorm, GemmaNormFused
from minisgl.models.recurrent import INTERVAL, DeltaSpec
from minisgl.models.spec import LayerSpec

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.models.config import ModelConfig
    from minisgl.models.decoder import LayerBuild

FULL, LINEAR = "full_attention", "linear_attention"


class GatedAttention(Attention):
    head_norm_type = GemmaNorm

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        spec, layer = at.spec, at.layer
        self.gated_qkv = LinearGatedQKV(
            at.build,
            in_size=spec.config.hidden_size,
            num_q_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            bias=spec.qkv_bias,
            prefix=f"{layer.prefix}.self_attn",
        )
        del self.qkv
        self.gates = create_gates(at.build.ops)

    def forward(
        self,
        norm: RMSNormFused,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        projected, residual_TD = self.gated_qkv.forward_normed(norm, x_TD, residual_TD)
        qkv, gate_TNH = self.gated_qkv.split_gate(projected)
        attended = self.attend.forward(qkv, batch)
        if rows_S is not None:
            residual_TD = norm.rows(residual_TD, rows_S, len(attended))
            attended, gate_TNH = attended[rows_S], gate_TNH[rows_S]
        return self.out.forward(self.gates.output(attended, gate_TNH)), residual_TD


class GatedAttentionBlock(Block):
    norm_type = GemmaNormFused
    attention_type = GatedAttention


class DeltaBlock(Block):
    norm_type = GemmaNormFused

    @staticmethod
    def attention_type(at: LayerBuild) -> GatedDeltaNet:
        spec, layer, delta = at.spec, at.layer, at.layer.recurrent
        assert isinstance(delta, DeltaSpec)
        return GatedDeltaNet(
            at.build,
            prefix=f"{layer.prefix}.linear_attn",
            hidden_size=spec.config.hidden_size,
            num_heads=layer.num_heads,
            num_key_heads=layer.num_kv_heads,
            key_dim=layer.head_dim,
            value_dim=delta.value_dim,
            taps=delta.taps,
            interval=INTERVAL,
            norm_eps=spec.config.norm_eps,
            projections=FusedProjections if delta.fused else Projections,
            place=at.place,
        )


def hybrid_layers(config: ModelConfig, *, fused: bool) -> tuple[LayerSpec, ...]:
    """Return the layers that the field `layer_types` describes. Without it, every
    `full_attention_interval`-th layer has attention. fused: see `DeltaSpec`. Raises ConfigError."""
    fields = config.fields
    period = fields.integer("full_attention_interval", 4)
    types = fields.values.get("layer_types")
    if types is None:
        types = [LINEAR if (i + 1) % period else FULL for i in range(config.num_layers)]
    if type(types) is not list or len(types) != config.num_layers:
        raise fields.error("layer_types", f"a list of {config.num_layers}")
    if any(kind not in (FULL, LINEAR) for kind in types):
        raise fields.error("layer_types", f"a list of {FULL} and {LINEAR}")
    num_heads = fields.integer("linear_num_value_heads")
    num_key_heads = fields.integer("linear_num_key_heads")
    if num_heads % num_key_heads:
        raise fields.error("linear_num_key_heads", f"a divisor of {num_heads} value heads")
    delta = DeltaSpec(
        value_dim=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim", minimum=2),
        fused=fused,
    )

    def layer(index: int, kind: str) -> LayerSpec:
        prefix = f"model.layers.{index}"
        if kind == FULL:
            return LayerSpec(
                prefix=prefix,
                window=None,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                rope=config.rope,
                block=GatedAttentionBlock,
            )
        return LayerSpec(
            prefix=prefix,
            window=None,
            num_heads=num_heads,
            num_kv_heads=num_key_heads,
            head_dim=fields.integer("linear_key_head_dim"),
            rope=config.rope,
            block=DeltaBlock,
            recurrent=delta,
        )

    return tuple(layer(index, kind) for index, kind in enumerate(types))


DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
