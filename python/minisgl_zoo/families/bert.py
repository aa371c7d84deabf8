"""BERT and RoBERTa: encoders (`minisgl_zoo.blocks.encoder`). MiniLM, BGE, E5, GTE and Arctic-embed
are BERTs, multilingual E5 and BGE-M3 are XLM-RoBERTas.

Source: Devlin et al. 2019; Liu et al. 2019; the classes `BertModel` and `XLMRobertaModel` of
transformers 5.24.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minisgl.models.config import ModelConfig
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.encoder import Encoder, Uncached


def _spec(config: ModelConfig, offset: int = 0) -> ModelSpec:
    fields = config.fields
    if (kind := fields.values.get("position_embedding_type", "absolute")) != "absolute":
        raise fields.error("position_embedding_type", f"absolute, not {kind}")
    if fields.flag("is_decoder", False):
        raise fields.error("is_decoder", "false, since these models are served as encoders")
    rope = replace(config.rope, max_position=config.rope.max_position - offset)
    config = replace(config, rope=rope)
    layers = layers_of(config, recurrent=Uncached())
    return ModelSpec(config=config, layers=layers, decoder=Encoder, is_encoder=True)


def _roberta(config: ModelConfig) -> ModelSpec:
    return _spec(config, config.fields.integer("pad_token_id", 1, minimum=0) + 1)


def _view(view: Any, config: ModelConfig) -> Any:
    """Leave out what only training and other tasks need."""
    view = view.renamed({"roberta.": "", "bert.": ""})
    for prefix in ("pooler.", "cls.", "lm_head.", "embeddings.position_ids"):
        view.drop(prefix)
    return view


BERT = Family(
    spec=_spec,
    renames={"layer_norm_eps": "rms_norm_eps"},
    defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-12, "type_vocab_size": 2},
    activation="gelu",
    view=_view,
)
ROBERTA = replace(BERT, spec=_roberta)
