"""Embedders and rerankers as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from helpers.embedders import cosines
from helpers.gguf_files import CONFIGS, write
from helpers.model_harness import make_reference
from minisgl.llm import LLM

TEXTS = ["Hello world", "The quick brown fox jumps over the lazy dog. " * 2]
KINDS = gguf.PoolingType


def written(folder: Path, pooling: gguf.PoolingType) -> Path:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(pooling)
        writer.add_add_eos_token(pooling == KINDS.LAST)  # as Qwen3-Embedding's
        if pooling == KINDS.RANK:
            rows = np.zeros((2, CONFIGS["qwen3"].hidden_size), np.float32)
            writer.add_tensor("cls.output.weight", rows)

    file = folder / "m.gguf"
    write(file, "qwen3", change=change)
    return file


@pytest.mark.parametrize("pooling", [KINDS.LAST, KINDS.MEAN, KINDS.CLS])
def test_the_file_says_how_it_embeds(pooling: gguf.PoolingType, tmp_path: Path) -> None:
    model: Any = make_reference(CONFIGS["qwen3"])
    with LLM(written(tmp_path, pooling), dtype="float32", num_pages=64, progress=False) as llm:
        ours, ids = llm.embed(TEXTS), [llm.tokenizer.encode(text) for text in TEXTS]
        eos = llm.tokenizer.eos_token_id
    assert all((each[-1] == eos) == (pooling == KINDS.LAST) for each in ids)
    rows = []
    for each in ids:
        with torch.inference_mode():
            x = model.model(torch.tensor([each])).last_hidden_state[0]
        rows.append({KINDS.LAST: x[-1], KINDS.MEAN: x.mean(0), KINDS.CLS: x[0]}[pooling].numpy())
    assert cosines(ours, np.stack(rows)).min() >= 0.99999
    assert np.allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)


def test_a_rerankers_own_rows_are_skipped(tmp_path: Path) -> None:
    """They are rows of the LM head, which the scores are read from."""
    file = written(tmp_path, KINDS.RANK)
    with LLM(file, dtype="float32", num_pages=64, progress=False) as llm:
        assert llm.embed(TEXTS).shape == (2, CONFIGS["qwen3"].hidden_size)
