"""The layers of Qwen's hybrids: most have a gated delta net, the others attention with a gate.

Norms multiply by 1 + the checkpoint's weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.blocks.decoder import Block
from minisgl.models.families.layer_types import FULL, types_in_config
from minisgl.models.spec import LayerSpec
from minisgl_zoo.blocks.delta_net import FusedProjections, GatedDeltaNet, Projections
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.families.gemma import GemmaNorm, GemmaNormFused
from minisgl_zoo.recurrent.spec import INTERVAL, DeltaSpec

if TYPE_CHECKING:
    from minisgl.models.blocks.decoder import LayerBuild
    from minisgl.models.config import ModelConfig

LINEAR = "linear_attention"


class HybridAttention(GatedAttention):
    head_norm_type = GemmaNorm


class GatedAttentionBlock(Block):
    norm_type = GemmaNormFused
    attention_type = HybridAttention


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
    types = types_in_config(config, (FULL, LINEAR)) or tuple(
        LINEAR if (index + 1) % period else FULL for index in range(config.num_layers)
    )
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
