"""Granite 4: Granite, in which most layers may have Mamba2 (H models), the MLP may have a mixture
beside it, and attention may not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.layers.moe import UngatedExpert
from minisgl.models.blocks.mixture import mixture_in_each_layer
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.granite_layers import granite_layers
from minisgl_zoo.blocks.rotation import no_rotation
from minisgl_zoo.families import granite
from minisgl_zoo.families.granite_moe import NAMES, granite_names

if TYPE_CHECKING:
    from minisgl.models.blocks.mixture import MoeSpec
    from minisgl.models.config import ModelConfig
    from minisgl_zoo.view import CheckpointView


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    if fields.values.get("position_embedding_type") != "rope":
        config = replace(config, rope=no_rotation(config))
    moe = None
    if fields.integer("num_local_experts", 8, minimum=0):
        moe = granite_mixture(config)
    else:
        config = replace(config, intermediate_size=fields.integer("shared_intermediate_size"))
    plain = granite.spec(config)
    return replace(plain, moe=moe, layers=granite_layers(config, plain.layers))


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


FAMILY = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    spec=spec,
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
