"""Nemotron-H, Nemotron Nano 2, Nemotron 3: Mamba2 in most layers, attention without rotation in a
few, and MLPs or mixtures with squared ReLU between them. Time steps have no bounds, as released
files say (`time_step_limit` is 0 to infinity); transformers 5.24 raises them to `time_step_min` at
least, so tokens with smaller steps differ there."""

from __future__ import annotations

from dataclasses import replace

from minisgl.models.config import ModelConfig
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_kinds import no_rotation
from minisgl_zoo.blocks.nemotron import layer_kinds, nemotron_layers, nemotron_mixture


def spec(config: ModelConfig) -> ModelSpec:
    kinds = layer_kinds(config)
    config = replace(config, num_layers=len(kinds), rope=no_rotation(config))
    return ModelSpec(
        config=config,
        layers=nemotron_layers(config, kinds),
        moe=nemotron_mixture(config, kinds) if "E" in kinds else None,
        mlp_bias=config.fields.flag("mlp_bias", False),
    )


NAMES = {
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    ".mixer.norm.": ".mixer.gated_norm.",
    **{f".mixer.{x}_proj.": f".self_attn.{x}_proj." for x in "qkvo"},
}


NEMOTRONH = Family(
    spec=spec,
    defaults={
        "num_hidden_layers": 1,  # transformers 5 writes only the layers' kinds
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
