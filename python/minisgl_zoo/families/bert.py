"""BERT and its kin: encoders (`minisgl_zoo.blocks.encoder`). MiniLM, BGE, E5, GTE and Arctic-embed
are BERTs, multilingual E5 and BGE-M3 are XLM-RoBERTas; MPNet adds a bias by distance, and NomicBERT
rotates. A cross-encoder has a head behind them, which scores a pair of texts: BGE's rerankers, and
those of MS MARCO.

Source: Devlin et al. 2019; Liu et al. 2019; Song et al. 2020; Nussbaum et al. 2024; the classes of
transformers 5.24, and theirs for sequence classification.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch.nn.functional as F

from minisgl.models.config import ModelConfig
from minisgl.models.spec import EMBEDDING, Family, ModelSpec, layers_of
from minisgl_zoo.blocks.encoder import Encoder, Form, Uncached

CLASSIFIER: Final = "ForSequenceClassification"
"""Ends the architecture of a cross-encoder."""
_NAMES: Final = {
    "roberta.": "",
    "bert.": "",
    "mpnet.": "",
    "embeddings.word_embeddings.weight": EMBEDDING,
    "embeddings.position_embeddings": "model.embed_positions",
    "embeddings.token_type_embeddings": "model.embed_types",
    "embeddings.LayerNorm": "model.embed_norm",
    "encoder.relative_attention_bias": "model.distances",
    "encoder.layer.": "model.layers.",
    ".attention.self.query": ".self_attn.q_proj",
    ".attention.self.key": ".self_attn.k_proj",
    ".attention.self.value": ".self_attn.v_proj",
    ".attention.output.dense": ".self_attn.o_proj",
    ".attention.output.LayerNorm": ".post_attention_layernorm",
    **{f".attention.attn.{part}.": f".self_attn.{part}_proj." for part in "qkvo"},
    ".attention.LayerNorm": ".post_attention_layernorm",
    ".intermediate.dense": ".mlp.up_proj",
    ".output.dense": ".mlp.down_proj",
    ".output.LayerNorm": ".post_mlp_layernorm",
    "classifier.dense.": "pooler.dense.",
    "classifier.out_proj.": "classifier.",
}
_NOMIC_NAMES: Final = {
    "embeddings.word_embeddings.weight": EMBEDDING,
    "embeddings.token_type_embeddings": "model.embed_types",
    "emb_ln": "model.embed_norm",
    "encoder.layers.": "model.layers.",
    ".attn.out_proj": ".self_attn.o_proj",
    ".attn.": ".self_attn.",
    ".mlp.fc11": ".mlp.up_proj",
    ".mlp.fc12": ".mlp.gate_proj",
    ".mlp.fc2": ".mlp.down_proj",
    ".norm1": ".post_attention_layernorm",
    ".norm2": ".post_mlp_layernorm",
}
_NOMIC: Final = {
    "prenorm": False, "parallel_block": False, "use_rms_norm": False, "num_experts": 0,
    "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_scaling_factor": None,
}  # fmt: skip
"""The values of fields that choose another computation."""


def encoder_spec(config: ModelConfig, form: Form, bias: bool = True, **fields: Any) -> ModelSpec:
    """Return the spec of an encoder. bias: of all linear layers. fields: of `layers_of`."""
    return ModelSpec(
        config=config,
        layers=layers_of(config, recurrent=Uncached(), **fields),
        decoder=partial(Encoder, form=form),
        is_encoder=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        num_labels=_num_labels(config),
    )


def _num_labels(config: ModelConfig) -> int:
    """Return 1 for a cross-encoder, 0 for an embedder. Raises ConfigError for a classifier."""
    fields = config.fields
    if not config.architecture.endswith(CLASSIFIER):
        return 0
    labels = len(fields.values.get("id2label") or ()) or fields.integer("num_labels", 2)
    if labels != 1:
        raise fields.error("id2label", f"one label, which is a score: it classifies into {labels}")
    return labels


def _bert(config: ModelConfig, **form: Any) -> ModelSpec:
    fields = config.fields
    if (kind := fields.values.get("position_embedding_type", "absolute")) != "absolute":
        raise fields.error("position_embedding_type", f"absolute, not {kind}")
    if fields.flag("is_decoder", False):
        raise fields.error("is_decoder", "false, since these models are served as encoders")
    made = Form(**{"offset": 0, "types": fields.integer("type_vocab_size"), **form})
    rope = replace(config.rope, max_position=config.rope.max_position - (made.offset or 0))
    return encoder_spec(replace(config, rope=rope), made)


def _roberta(config: ModelConfig) -> ModelSpec:
    return _bert(config, offset=config.fields.integer("pad_token_id", 1, minimum=0) + 1)


def _mpnet(config: ModelConfig) -> ModelSpec:
    buckets = config.fields.integer("relative_attention_num_buckets", 32)
    return _bert(config, offset=2, types=0, buckets=buckets)  # pads have row 1, whatever their id


def _nomic(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    for name, value in _NOMIC.items():
        if fields.values.get(name) not in (None, value):
            raise fields.error(name, f"{value}: other Nomic encoders are not served")
    if config.activation != "silu":
        raise fields.error("hidden_act", "swiglu")
    form = Form(
        types=fields.integer("type_vocab_size"), rotates=True, activation=F.silu, is_gated=True
    )
    return encoder_spec(config, form, bias=False)


def without(view: Any, config: ModelConfig, *skipped: str) -> Any:
    """Leave out what only training and other tasks need."""
    if not config.architecture.endswith(CLASSIFIER):
        skipped += ("pooler.", "classifier.", "head.")
    for prefix in ("cls.", "lm_head.", "decoder.", *skipped):
        view.drop(prefix)
    return view


def _bert_view(view: Any, config: ModelConfig) -> Any:
    return without(view.renamed(_NAMES), config, "embeddings.position_ids")


def _nomic_view(view: Any, config: ModelConfig) -> Any:
    return split_qkv(without(view.renamed(_NOMIC_NAMES), config), config)


def split_qkv(view: Any, config: ModelConfig) -> Any:
    """Show the fused projection as those of queries, keys and values."""
    names = ("q_proj", "k_proj", "v_proj")
    return view.split("Wqkv", names, (config.num_heads * config.head_dim,) * 3)


BERT = Family(
    spec=_bert,
    renames={"layer_norm_eps": "rms_norm_eps"},
    defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-12, "type_vocab_size": 2},
    activation="gelu",
    view=_bert_view,
)
ROBERTA = replace(BERT, spec=_roberta)
MPNET = replace(BERT, spec=_mpnet)
NOMIC = Family(
    spec=_nomic,
    renames={
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size", "layer_norm_epsilon": "rms_norm_eps",
        "layer_norm_eps": "rms_norm_eps", "activation_function": "hidden_act",
        "rotary_emb_base": "rope_theta",
    },
    defaults={
        "hidden_act": "swiglu", "rms_norm_eps": 1e-12, "type_vocab_size": 2,
        "max_position_embeddings": 2048,
    },
    activations={"swiglu": "silu"},
    view=_nomic_view,
)  # fmt: skip
