"""Granite 3, Granite 4 and Granite Swash: multipliers for the embedding, for attention scores, for
the outputs of attention and MLP, and for the logits.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from minisgl.attention.base import SINKS
from minisgl.core import Batch
from minisgl.layers.moe import ExpertNames
from minisgl.layers.rotary import RotaryConfig
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.blocks.mixture import MoeSpec, expert_names, mixture_in_each_layer
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import FULL, SLIDING, plain, types_in_config
from minisgl.models.spec import Family, LayerSpec, ModelSpec, layers_of
from minisgl_zoo.blocks.attention import SinkAttention
from minisgl_zoo.blocks.layer_kinds import layers_of_types, no_rotation, with_ropes
from minisgl_zoo.blocks.mamba2 import Mamba2, as_mamba, letter_of
from minisgl_zoo.blocks.routers import UngatedExpert
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.view import CheckpointView


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


class SinkBlock(GraniteBlock):
    attention_type = SinkAttention


class MambaBlock(GraniteBlock):
    attention_type = staticmethod(partial(Mamba2, module="mamba"))


def granite(config: ModelConfig, moe: Callable[[ModelConfig], MoeSpec] | None = None) -> ModelSpec:
    fields = config.fields
    scale = fields.number("attention_multiplier", 1.0)
    return plain(
        config,
        layers=partial(layers_of, block=GraniteBlock, scale=scale),
        moe=moe,
        mlp_bias="mlp_bias",
        decoder=partial(
            ScaledDecoder,
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0),
        ),
    )


def granite_names(layer: int) -> ExpertNames:
    """Return the names in released files, which have one tensor for all experts."""
    prefix = f"model.layers.{layer}.block_sparse_moe"
    return replace(
        expert_names(prefix, router="router.layer"),
        all_gate_up=f"{prefix}.input_linear.weight",
        all_down=f"{prefix}.output_linear.weight",
    )


def granite_mixture(config: ModelConfig) -> MoeSpec:
    """Return Granite's mixture, with an expert that every token takes if its width is above 0."""
    width = config.fields.integer("shared_intermediate_size", minimum=0)
    shared = {"shared_size": width, "shared": UngatedExpert} if width else {}
    return mixture_in_each_layer(config, granite_names, **shared)


def separate_mlp(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Split the tensor of gate and up, and name the MLP as the layers do."""
    fields = config.fields
    mlp = "mlp.shared_experts" if fields.integer("num_local_experts", 8, minimum=0) else "mlp"
    width = fields.integer("shared_intermediate_size")
    halves = f"{mlp}.gate_proj", f"{mlp}.up_proj"
    view = view.split("shared_mlp.input_linear", halves, (width, width))
    return view.renamed({"shared_mlp.output_linear.": f"{mlp}.down_proj."})


def granite_hybrid(config: ModelConfig) -> ModelSpec:
    """Most layers may have Mamba2, the MLP a mixture beside it, and attention may not rotate."""
    fields = config.fields
    if fields.values.get("position_embedding_type") != "rope":
        config = replace(config, rope=no_rotation(config))
    has_experts = fields.integer("num_local_experts", 8, minimum=0) > 0
    if not has_experts:
        config = replace(config, intermediate_size=fields.integer("shared_intermediate_size"))
    made = granite(config, granite_mixture if has_experts else None)
    return replace(made, layers=hybrid_layers(config, made.layers))


def hybrid_layers(config: ModelConfig, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return `layers`, those with Mamba2 as the field `layer_types` says. Raises ConfigError."""
    fields, count = config.fields, config.num_layers
    types = fields.values.get("layer_types") or ["mamba"] * count
    kinds = [*map(letter_of, types)] if isinstance(types, list) else []
    if len(kinds) != count or not {*kinds} <= {"M", "*"}:
        raise fields.error("layer_types", f"a list of {count}, each attention or mamba")
    return tuple(
        _mamba(config, layer) if kind == "M" else layer
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _mamba(config: ModelConfig, layer: LayerSpec) -> LayerSpec:
    mamba = as_mamba(
        config, layer, MambaBlock, out_bias=config.fields.flag("mamba_proj_bias", False)
    )
    if mamba.num_kv_heads != 1:
        raise config.fields.error("mamba_n_groups", "1: the norm of this family is over all heads")
    return mamba


def granite_swa(
    config: ModelConfig, moe: Callable[[ModelConfig], MoeSpec] | None = None
) -> ModelSpec:
    """Heads have sinks, and three of four layers a window; a layer may have a rotation of its own,
    or none."""
    types = types_in_config(config, (FULL, SLIDING)) or tuple(
        SLIDING if index % 4 else FULL for index in range(config.num_layers)
    )
    made = granite(config, moe)
    layers = layers_of_types(config, types, block=SinkBlock, scale=made.layers[0].scale)
    return replace(made, layers=with_ropes(layers, _ropes(config)), attention=(SINKS,))


def _ropes(config: ModelConfig) -> list[RotaryConfig]:
    """Return each layer's rotation. In the field `layer_rope_theta`, 0 is none."""
    fields, count = config.fields, config.num_layers
    thetas = fields.values.get("layer_rope_theta")
    if thetas is None:
        return [config.rope] * count
    is_list = type(thetas) is list and len(thetas) == count
    if not is_list or not all(type(theta) in (int, float) and theta >= 0 for theta in thetas):
        raise fields.error("layer_rope_theta", f"a list of {count} numbers, none below 0")
    none = no_rotation(config)
    return [replace(config.rope, theta=float(theta)) if theta else none for theta in thetas]


def separate_shared(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """`separate_mlp`, if every token takes an expert."""
    has_shared = config.fields.integer("shared_intermediate_size", minimum=0) > 0
    return separate_mlp(view, config) if has_shared else view


NAMES = {
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
}
"""Parts of names as transformers 5 writes them -> as in released files."""


GRANITE = Family(spec=granite, defaults={"max_position_embeddings": 2048})
GRANITEMOE = Family(
    spec=partial(granite, moe=partial(mixture_in_each_layer, names=granite_names)),
    names=NAMES,
    defaults={
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
GRANITEMOEHYBRID = Family(
    spec=granite_hybrid,
    names={**NAMES, ".mamba.norm.": ".mamba.gated_norm."},
    view=separate_mlp,
    defaults={
        "max_position_embeddings": 2048,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
    },
)
GRANITESWA = Family(
    spec=granite_swa,
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    },
)
GRANITEMOESWA = Family(
    spec=partial(granite_swa, moe=granite_mixture),
    names=NAMES,
    view=separate_shared,
    defaults={**GRANITEMOE.defaults, "sliding_window": 128, "shared_intermediate_size": 0},
)
