"""A tiny checkpoint, and transformers' model of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3Config

from helpers.engine_runs import VOCAB, Reference
from helpers.model_harness import make_reference


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("qwen3")
    model = make_reference(config)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def folder(reference: Reference) -> Path:
    return reference[0]
