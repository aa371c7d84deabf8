"""Granite 4: Granite with Mamba2 in most layers (H models) or none, and a mixture beside the MLP or
none; attention may not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.layers.moe import UngatedExpert
from minisgl.models import granite
from minisgl.models.granite_moe import NAMES, granite_names
from minisgl.models.mamba2 import MambaSpec, check_mamba, letter_of, mamba_sizes, mixer
from minisgl.models.mixture import mixture_in_each_layer
from minisgl.models.rotation import no_rotation
from minisgl.models.spec import Family, ModelSpec

if TYPE_CHECKING:
    from minisgl.layers.mamba2 import Mamba2
    from minisgl.models.config import ModelConfig
    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import LayerSpec
    from minisgl.models.view import CheckpointView


class MambaBlock(granite.GraniteBlock):
    @staticmethod
    def attention_type(at: LayerBuild) -> Mamba2:
        return mixer(at, "mamba")


def spec(config: ModelConfig) -> ModelSpec:
    fields, count = config.fields, config.num_layers
    if fields.values.get("position_embedding_type") != "rope":
        config = replace(config, rope=no_rotation(config))
    moe = None
    if fields.integer("num_local_experts", 8, minimum=0):
        width = fields.integer("shared_intermediate_size")
        shared = {"shared_size": width, "shared": UngatedExpert}
        moe = mixture_in_each_layer(config, granite_names, **shared)
    else:
        config = replace(config, intermediate_size=fields.integer("shared_intermediate_size"))
    plain = granite.spec(config)
    types = fields.values.get("layer_types") or ["mamba"] * count
    kinds = [*map(letter_of, types)] if isinstance(types, list) else []
    if len(kinds) != count or not {*kinds} <= {"M", "*"}:
        raise fields.error("layer_types", f"a list of {count}, each attention or mamba")
    layers = zip(plain.layers, kinds, strict=True)
    return replace(
        plain,
        moe=moe,
        layers=tuple(_mamba(config, layer) if kind == "M" else layer for layer, kind in layers),
    )


def _mamba(config: ModelConfig, layer: LayerSpec) -> LayerSpec:
    fields = config.fields
    num_heads, head_dim, num_groups, state_size = mamba_sizes(config)
    if num_groups != 1:
        raise fields.error("mamba_n_groups", "1: here the norm is over all heads")
    check_mamba(fields)
    bias = fields.flag("mamba_proj_bias", False)
    taps = fields.integer("mamba_d_conv", minimum=2)
    return replace(
        layer,
        num_heads=num_heads,
        num_kv_heads=num_groups,
        head_dim=state_size,
        block=MambaBlock,
        recurrent=MambaSpec(value_dim=head_dim, taps=taps, fused=False, bias=bias, out_bias=bias),
    )


def view(view: CheckpointView, config: ModelConfig) -> CheckpointView:
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
    view=view,
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
