"""A tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_harness import make_reference
from test_equalities import VOCAB
from transformers import Qwen3Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    folder = tmp_path_factory.mktemp("tiny")
    make_reference(config).save_pretrained(folder)
    return folder
