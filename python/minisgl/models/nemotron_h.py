"""Nemotron-H, Nemotron Nano 2, Nemotron 3: Mamba2 in most layers, attention without rotation in a
few, MLPs or mixtures with squared ReLU between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.mamba2 import MambaSpec
from minisgl.models.nemotron_block import MambaAttentionBlock, MambaBlock, blocks_of, layer_kinds
from minisgl.models.rotation import no_rotation
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import LayerSpec


def spec(config: ModelConfig) -> ModelSpec:
    fields, kinds = config.fields, layer_kinds(config)
    for name, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if fields.values.get(name, only) != only:
            raise fields.error(name, only)
    if not fields.flag("use_conv_bias", True):
        raise fields.error("use_conv_bias", "true: convolutions without a bias are not served")
    mamba = MambaSpec(
        value_dim=fields.integer("mamba_head_dim"),
        taps=fields.integer("conv_kernel", minimum=2),
        fused=False,
        bias=(bias := fields.flag("use_bias", False)),
        out_bias=bias,
    )
    num_heads, num_groups = fields.integer("mamba_num_heads"), fields.integer("n_groups")
    if num_heads % num_groups:
        raise fields.error("n_groups", f"a divisor of {num_heads} Mamba heads")
    config = replace(config, num_layers=len(kinds), rope=no_rotation(config))

    def of_kind(layer: LayerSpec, kind: str) -> LayerSpec:
        if kind == "*":
            return replace(layer, block=MambaAttentionBlock)
        return replace(
            layer,
            num_heads=num_heads,
            num_kv_heads=num_groups,
            head_dim=fields.integer("ssm_state_size"),
            block=MambaBlock,
            recurrent=mamba,
        )

    layers = layers_of(config)
    mixture = None
    if "E" in kinds:
        from minisgl.models.nemotron_experts import nemotron_mixture

        mixture = nemotron_mixture(config, kinds)
    return ModelSpec(
        config=config,
        layers=tuple(of_kind(layers[index], kinds[index]) for index in blocks_of(kinds)),
        moe=mixture,
        mlp_bias=fields.flag("mlp_bias", False),
    )


NAMES = {
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    ".mixer.norm.": ".mixer.gated_norm.",
    **{f".mixer.{x}_proj.": f".self_attn.{x}_proj." for x in "qkvo"},
}


FAMILY = Family(
    architectures=("NemotronHForCausalLM",),
    spec=spec,
    defaults={
        "num_hidden_layers": 1,  # transformers 5 writes the layers' kinds alone
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    renames={"layer_norm_epsilon": "rms_norm_eps", "attention_head_dim": "head_dim"},
    names=NAMES,
)
