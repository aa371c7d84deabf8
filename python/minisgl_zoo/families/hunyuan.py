"""Hunyuan: queries and keys are normed per head after their rotation; files may give a number alpha
that raises the rotation's base. Hunyuan-A13B has a mixture in each layer, and an expert that every
token takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from minisgl.layers import AttentionLayer, RMSNorm
from minisgl.layers.base import Identity
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.blocks.mixture import MoeSpec, mixture_in_each_layer, names_in_mlp
from minisgl.models.config import Fields, ModelConfig
from minisgl.models.families.dense import plain
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.attention import SplitAttentionLayer
from minisgl_zoo.blocks.layer_kinds import default_rope, rope_fields
from minisgl_zoo.blocks.routers import UngatedExpert

TOP_K = "num_experts_per_tok"


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


class HunyuanExpert(UngatedExpert):
    module = "shared_mlp"


def hunyuan(config: ModelConfig, moe: Callable[[ModelConfig], MoeSpec] | None = None) -> ModelSpec:
    rope, settings = config.rope, rope_fields(config)
    if rope.rope_type == "dynamic" and settings.values.get("alpha") is not None:
        alpha = settings.number("alpha")
        if alpha > 1e6:  # 1,000 in released files
            raise settings.error("alpha", "at most 1000000")
        theta = rope.theta * alpha ** (rope.rotary_dim / (rope.rotary_dim - 2))
        config = replace(config, rope=default_rope(rope, theta))
    return plain(config, layers=partial(layers_of, block=HunyuanBlock), moe=moe)


def hunyuan_mixture(config: ModelConfig) -> MoeSpec:
    """`moe_topk` may be a list with a number for each layer, which must be the same here."""
    fields, each = config.fields, config.fields.values[TOP_K]
    if type(each) is list:
        if len(each) != config.num_layers or each != each[:1] * config.num_layers:
            raise fields.error(TOP_K, f"the same number for each of {config.num_layers} layers")
        config = replace(config, fields=Fields({**fields.values, TOP_K: each[0]}, fields.where))
    return mixture_in_each_layer(
        config, names_in_mlp, shared=HunyuanExpert, shared_size=config.intermediate_size
    )


HUNYUANDENSEV1 = Family(
    spec=hunyuan,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
HUNYUANMOEV1 = Family(
    spec=partial(hunyuan, moe=hunyuan_mixture),
    names={".mlp.gate.wg.": ".mlp.gate."},
    renames={"num_experts": "num_local_experts", "moe_topk": TOP_K},
    defaults={**HUNYUANDENSEV1.defaults, "num_local_experts": 1, TOP_K: 1},
)
