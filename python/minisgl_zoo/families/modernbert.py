"""ModernBERT: an encoder with norms before both halves of a block, rotation, and windows in two of
three layers. GTE's and Nomic's embedders of this kind, and GTE's reranker.

Source: Warner et al. 2024; the class `ModernBertModel` of transformers 5.24, and its one for
sequence classification.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch.nn.functional as F

from minisgl.models.config import ModelConfig
from minisgl.models.spec import EMBEDDING, Family, ModelSpec
from minisgl_zoo.blocks.encoder import Form
from minisgl_zoo.families.bert import encoder_spec, split_qkv, without

_NAMES: Final = {
    "model.embeddings.": "embeddings.",
    "model.layers.": "layers.",
    "model.final_norm": "final_norm",
    "embeddings.tok_embeddings.weight": EMBEDDING,
    "embeddings.norm": "model.embed_norm",
    "final_norm": "model.norm",
    "layers.": "model.layers.",
    ".attn_norm": ".input_layernorm",
    ".mlp_norm": ".post_attention_layernorm",
    ".attn.Wo": ".self_attn.o_proj",
    ".attn.": ".self_attn.",
    ".mlp.Wo": ".mlp.down_proj",
    "head.dense": "pooler.dense",
    "head.norm": "pooler.norm",
}


def _spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    flags = {name: fields.flag(name, False) for name in ("attention_bias", "mlp_bias")}
    if any(flags.values()) and not all(flags.values()):
        raise fields.error("mlp_bias", "equal to attention_bias")
    form = Form(
        rotates=True,
        activation=F.gelu,
        is_gated=True,
        is_prenorm=True,
        norm_bias=fields.flag("norm_bias", False),
        head_activation=F.gelu,
        head_norms=True,
        head_bias=fields.flag("classifier_bias", False),
        head_means=fields.values.get("classifier_pooling", "cls") == "mean",
    )
    spec = encoder_spec(config, form, bias=flags["mlp_bias"])
    every = fields.integer("global_attn_every_n_layers", 3)
    types = fields.values.get("layer_types") or [
        "sliding_attention" if index % every else "full_attention"
        for index in range(config.num_layers)
    ]
    window = fields.integer("local_attention", 128) // 2 * 2 + 1
    own = (fields.values.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = own.get("rope_theta") or fields.number("local_rope_theta", 10_000.0)
    local = replace(config.rope, theta=float(theta))
    layers = tuple(
        replace(layer, window=window, rope=local) if kind == "sliding_attention" else layer
        for layer, kind in zip(spec.layers, types, strict=True)
    )
    return replace(spec, layers=layers)


def _view(view: Any, config: ModelConfig) -> Any:
    view = split_qkv(without(view.renamed(_NAMES), config), config)
    return view.split("Wi", ("gate_proj", "up_proj"), (config.intermediate_size,) * 2)


MODERNBERT = Family(
    spec=_spec,
    renames={
        "norm_eps": "rms_norm_eps",
        "hidden_activation": "hidden_act",
        "global_rope_theta": "rope_theta",
    },
    defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "rope_theta": 160_000.0},
    activation="gelu",
    layer_ropes=True,
    view=_view,
)
