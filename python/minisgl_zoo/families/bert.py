"""BERT and RoBERTa: encoders (`minisgl_zoo.blocks.encoder`). MiniLM, BGE, E5, GTE and Arctic-embed
are BERTs, multilingual E5 and BGE-M3 are XLM-RoBERTas. A cross-encoder has a head behind them,
which scores a pair of texts: BGE's rerankers, and those of MS MARCO.

Source: Devlin et al. 2019; Liu et al. 2019; the classes `BertModel` and `XLMRobertaModel` of
transformers 5.24, and theirs for sequence classification.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from minisgl.models.config import ModelConfig
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.encoder import Encoder, Uncached

CLASSIFIER: Final = "ForSequenceClassification"
"""Ends the architecture of a cross-encoder."""


def _spec(config: ModelConfig, offset: int = 0) -> ModelSpec:
    fields = config.fields
    if (kind := fields.values.get("position_embedding_type", "absolute")) != "absolute":
        raise fields.error("position_embedding_type", f"absolute, not {kind}")
    if fields.flag("is_decoder", False):
        raise fields.error("is_decoder", "false, since these models are served as encoders")
    rope = replace(config.rope, max_position=config.rope.max_position - offset)
    config = replace(config, rope=rope)
    return ModelSpec(
        config=config,
        layers=layers_of(config, recurrent=Uncached()),
        decoder=Encoder,
        is_encoder=True,
        num_labels=num_labels(config),
    )


def num_labels(config: ModelConfig) -> int:
    """Return 1 for a cross-encoder, 0 for an embedder. Raises ConfigError for a classifier."""
    fields = config.fields
    if not config.architecture.endswith(CLASSIFIER):
        return 0
    labels = len(fields.values.get("id2label") or ()) or fields.integer("num_labels", 2)
    if labels != 1:
        raise fields.error("id2label", f"one label, which is a score: it classifies into {labels}")
    return labels


def _roberta(config: ModelConfig) -> ModelSpec:
    return _spec(config, config.fields.integer("pad_token_id", 1, minimum=0) + 1)


def _view(view: Any, config: ModelConfig) -> Any:
    """Leave out what only training and other tasks need."""
    heads = {"classifier.dense.": "pooler.dense.", "classifier.out_proj.": "classifier."}
    view = view.renamed({"roberta.": "", "bert.": "", **heads})
    skipped = ["cls.", "lm_head.", "embeddings.position_ids"]
    if not config.architecture.endswith(CLASSIFIER):
        skipped += ["pooler.", "classifier."]
    for prefix in skipped:
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
