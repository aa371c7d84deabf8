"""From the names of a GGUF file's tensors to the names that our layers declare.

The kind of a tensor is its name without the layer and the last part: `attn_q` for
`blk.3.attn_q.weight`. Names of routers and experts come from the family's spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from minisgl.layers.moe import ExpertNames
from minisgl.models.config import ModelConfig
from minisgl.models.registry import spec_of
from minisgl_zoo.gguf.changes import ALL, change_of, parts_of
from minisgl_zoo.gguf.tensors import Change

GLOBAL_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's last norm, in spite of its name
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_sinks.weight": "self_attn.sinks",
}
SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
AFTER: Final = {"post_attention_norm": "post_attention_layernorm"}
SHARED_EXPERTS: Final = {
    f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")
}
QWEN_SHARED_EXPERT: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
}
LATENTS: Final = {
    **SHARED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # in older files; later ones have two tensors
}
LATENT_HEADS: Final = ("attn_k_b.weight", "attn_v_b.weight")
DELTA: Final = {
    **AFTER,
    **QWEN_SHARED_EXPERT,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
CONV: Final = {f"shortconv.{x}": f"conv.{x}" for x in ("conv", "in_proj", "out_proj")}
GEMMA4: Final = {
    **SANDWICH,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}


def _mamba(mixer: str) -> dict[str, str]:
    return {
        "ssm_in": f"{mixer}.in_proj",
        "ssm_conv1d": f"{mixer}.conv1d",
        "ssm_norm": f"{mixer}.gated_norm",
        "ssm_out": f"{mixer}.out_proj",
        "ssm_a": f"{mixer}.A_log",
        "ssm_d": f"{mixer}.D",
        "ssm_dt.bias": f"{mixer}.dt_bias",
    }


GRANITE: Final = {**_mamba("mamba"), **SHARED_EXPERTS}
NEMOTRON: Final = {
    **_mamba("mixer"),
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
ENCODER: Final = {
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
ENCODER_GLOBALS: Final = {
    "token_embd_norm": "model.embed_norm",
    "token_types": "model.embed_types",
    "position_embd": "model.embed_positions",
    "cls": "pooler.dense",
    "cls.output": "classifier",
}
ENCODERS: Final = ("bert", "nomic-bert")
ARCHITECTURE_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "gemma-embedding": SANDWICH,
    "gemma4": GEMMA4,
    "olmo2": SANDWICH,
    "exaone4": SANDWICH,
    "afmoe": {
        **SHARED_EXPERTS,
        "post_attention_norm": "post_attention_layernorm",
        "attn_gate": "self_attn.gate_proj",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "gpt-oss": AFTER,
    "seed_oss": AFTER,
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "deepseek2": LATENTS,
    "glm4moe": {**AFTER, **SHARED_EXPERTS},
    "dots1": SHARED_EXPERTS,
    "qwen2moe": QWEN_SHARED_EXPERT,
    "qwen3next": DELTA,
    "qwen35": DELTA,
    "qwen35moe": DELTA,
    "lfm2": CONV,
    "lfm2moe": CONV,
    "hunyuan-dense": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitehybrid": GRANITE,
    "falcon-h1": {**_mamba("mamba"), "ffn_norm": "post_attention_layernorm.weight"},
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": NEMOTRON,
    **dict.fromkeys(ENCODERS, ENCODER),
}
"""Architecture -> the names that differ from `LAYER_NAMES`."""
EXPERT_KINDS: Final = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
"""Kinds of [E, O, I], of which our layers declare a tensor for each expert -> the field of
`ExpertNames`."""
STACKED: Final = ("gpt-oss",)
"""Architectures whose checkpoints have one tensor for all experts."""


def names_of(arch: str) -> dict[str, str]:
    """Return the names for a layer's tensors, without their last part. A key is a kind; or a kind
    with the last part, and then its name is whole, too."""
    return {**LAYER_NAMES, **ARCHITECTURE_NAMES.get(arch, {})}


@dataclass(frozen=True, slots=True)
class Place:
    """A declared name, and the part of the file's tensor that it names. index: rows of the tensor,
    or an expert, or an expert and its rows. change: see `change_of`."""

    name: str
    index: int | slice | tuple[int, slice]
    change: Change | None = None


class Places:
    """The places of one model's tensors."""

    def __init__(self, arch: str, config: ModelConfig) -> None:
        self._arch, self._config = arch, config
        self._layer_names, self._routed = names_of(arch), _routed(config)
        own = ENCODER_GLOBALS if arch in ENCODERS else {}
        self._global_names = {**GLOBAL_NAMES, **own}

    def of(self, name: str, shape: Sequence[int]) -> Iterator[Place]:
        """Yield the places of a file's tensor. shape: its first axis has rows or experts."""
        layer, part = split_name(name)
        kind, _, suffix = part.rpartition(".") if "." in part else (part, "", "weight")
        names = self._routed.get(layer)
        if whole := self._layer_names.get(part):
            yield Place(layer + whole, ALL, change_of(self._arch, kind, self._config))
        elif names and kind in EXPERT_KINDS:
            pattern: str = getattr(names, EXPERT_KINDS[kind])
            for expert in range(shape[0]):
                yield Place(pattern.format(expert), expert)
        elif names and names.gate and kind == "ffn_gate_up_exps":
            half = shape[1] // 2
            for expert in range(shape[0]):
                yield Place(names.gate.format(expert), (expert, slice(half)))
                yield Place(names.up.format(expert), (expert, slice(half, None)))
        else:
            known = self._layer_names if layer else self._global_names
            if names:
                router = names.router.removeprefix(layer).removesuffix(".weight")
                known = {**known, "ffn_gate_inp": router, "exp_probs_b": router}
                suffix = "e_score_correction_bias" if kind == "exp_probs_b" else suffix
            for own, own_rows in parts_of(self._arch, kind, shape[0], self._config):
                change = change_of(self._arch, own, self._config)
                yield Place(f"{layer}{known.get(own, own)}.{suffix}", own_rows, change)


def _routed(config: ModelConfig) -> dict[str, ExpertNames]:
    """Return a layer's prefix -> the names of its router and experts."""
    moe = spec_of(config).moe
    if moe is None:
        return {}
    found = [moe.names(index) for index, sparse in enumerate(moe.is_sparse) if sparse]
    return {".".join(names.router.split(".", 3)[:3]) + ".": names for names in found}


def split_name(name: str) -> tuple[str, str]:
    """blk.3.attn_q.weight -> ("model.layers.3.", "attn_q.weight"); others -> ("", name)."""
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk":
        return f"model.layers.{parts[1]}.", parts[2]
    return "", name
