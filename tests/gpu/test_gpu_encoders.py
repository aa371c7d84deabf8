"""Encoders on a GPU: in 16 bits one kernel attends for texts of all lengths, in float32 each length
has a call."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from helpers.embedders import TEXTS, cosines, embeddings_of, later, older, save_encoder
from helpers.gguf_encoders import write_encoder
from minisgl.llm import LLM

SHORT = [*(text[:40] for text in TEXTS), "the same the"]
WIDE = {"hidden_size": 64}  # heads of 16 dims, which the kernel takes
CLOSE = {"float32": 0.99999, "float16": 0.9999, "bfloat16": 0.999}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the longest texts of the kernel's calls, as they come."""
    longest: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        longest.append(args[5])
        return varlen_attn(*args, **kwargs)

    varlen = importlib.import_module("torch.nn.attention.varlen")
    varlen_attn = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", counted)
    return longest


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("kind", "pooling", "mode"),
    [
        ("bert", older("mean"), "mean"),
        ("xlm-roberta", later("cls"), "cls"),
        ("mpnet", older("mean"), "mean"),
        ("nomic", older("mean"), "mean"),
        ("modernbert", later("cls"), "cls"),  # the texts are longer than its windows
        ("gemma", older("mean"), "mean"),
    ],
)
def test_the_vectors_are_those_of_transformers(
    kind: str, pooling: Any, mode: str, dtype: str, joined: list[int], tmp_path: Path
) -> None:
    sizes = {**WIDE, "head_dim": 16} if kind == "nomic" else WIDE
    folder = save_encoder(tmp_path / "m", kind, pooling=pooling, **sizes)
    expected = embeddings_of(folder, SHORT, mode)
    with LLM(folder, dtype=dtype, device="cuda", progress=False) as llm:
        joined.clear()
        batch = llm.embed(SHORT)
        single = np.concatenate([llm.embed(text) for text in SHORT])
        many = llm.embed(SHORT * 300)[-len(SHORT) :]  # several steps
        assert llm._engine.engine.memory.kv_bytes == 0
    for ours in (batch, single, many):
        assert cosines(ours, expected).min() >= CLOSE[dtype]
    has_kernel = dtype != "float32" and kind != "mpnet"  # whose scores have a bias
    assert bool(joined) == has_kernel


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_cross_encoder(dtype: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", labels=1, **WIDE)
    with LLM(folder, dtype="float32", device="cpu", progress=False) as llm:
        expected = llm.score(SHORT[0], SHORT)
    with LLM(folder, dtype=dtype, device="cuda", progress=False) as llm:
        scores = llm.score(SHORT[0], SHORT)
    assert scores == pytest.approx(expected, abs=1e-5 if dtype == "float32" else 2e-3)


def test_packed_matrices(joined: list[int], tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", "bert", hidden_size=64, intermediate_size=128)
    file = write_encoder(folder, tmp_path / "m.gguf", gguf.PoolingType.MEAN, Kind.Q8_0)
    with LLM(file, dtype="bfloat16", device="cuda", progress=False) as llm:
        ours = llm.embed(SHORT)
    assert joined
    assert cosines(ours, embeddings_of(folder, SHORT, "mean")).min() > 0.998
