"""Encoders as llama.cpp's converter writes them: the vectors of the checkpoints they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from helpers.embedders import TEXTS, cosines, embeddings_of, older, save_encoder
from helpers.gguf_encoders import unigram_values, write_encoder
from minisgl.llm import LLM
from minisgl_zoo.gguf.tokenizer import tokenizer_files

SHORT = [text[:40] for text in TEXTS]
ODD = [
    "Caf\u00e9 \u00c5ngstr\u00f6m, \uff21\uff22\uff23 [SEP] \u4f60\u597d!",
    "it's 3.14\t x\n\ny  ",
    "\u200bzero",
]
OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False}
POOLED = gguf.PoolingType


@pytest.mark.parametrize(
    ("kind", "pooling", "mode"),
    [
        ("bert", POOLED.MEAN, "mean"),
        ("xlm-roberta", POOLED.CLS, "cls"),
        ("nomic", POOLED.MEAN, "mean"),
    ],
)
def test_the_vectors_are_those_of_the_checkpoint(
    kind: str, pooling: gguf.PoolingType, mode: str, tmp_path: Path
) -> None:
    folder = save_encoder(tmp_path / "m", kind)
    file = write_encoder(folder, tmp_path / "m.gguf", pooling)
    with LLM(file, dtype="float32", **OPTIONS) as llm:
        ours = llm.embed(SHORT)
        theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
        theirs.no_truncation()
        theirs.no_padding()
        for text in (*TEXTS[:2], *ODD):
            assert llm.tokenizer.encode(text) == theirs.encode(text).ids
        assert llm._engine.context == 32
    assert cosines(ours, embeddings_of(folder, SHORT, mode)).min() >= 0.99999
    assert abs((ours**2).sum(1) - 1).max() < 1e-5


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0])
def test_embeddinggemma(kind: Kind, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    folder = save_encoder(tmp_path / "m", "gemma", pooling=older("mean"), dense=(96, 64), **sizes)
    file = write_encoder(folder, tmp_path / "m.gguf", POOLED.MEAN, kind)
    with LLM(file, dtype="float32", **OPTIONS) as llm:
        ours = llm.embed(SHORT)
    least = 0.99999 if kind in (Kind.F32, Kind.F16) else 0.999
    assert cosines(ours, embeddings_of(folder, SHORT, "mean")).min() >= least


def test_packed_matrices(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", "bert", hidden_size=64, intermediate_size=96)
    file = write_encoder(folder, tmp_path / "m.gguf", POOLED.MEAN, Kind.Q8_0)
    with LLM(file, **OPTIONS) as llm:
        ours = llm.embed(SHORT)
    assert cosines(ours, embeddings_of(folder, SHORT, "mean")).min() > 0.999


def test_a_cross_encoder(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", "xlm-roberta", labels=1)
    file = write_encoder(folder, tmp_path / "m.gguf", POOLED.RANK)
    with LLM(file, dtype="float32", **OPTIONS) as llm:
        ours = llm.score(SHORT[0], SHORT[1:3])
        pair = llm.tokenizer.backend.encode("a", "b")
        assert (pair.type_ids, len(pair.ids)) == ([0, 0, 0, 1, 1], 5)
        encode = llm.tokenizer.backend.encode
        ids = [encode(SHORT[0], document).ids for document in SHORT[1:3]]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = [float(model(torch.tensor([each])).logits.sigmoid()) for each in ids]
    assert ours == pytest.approx(expected, abs=1e-6)


def test_unigrams_are_those_of_sentencepiece(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\n".join(TEXTS * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "sp"), vocab_size=90, minloglevel=2,
        character_coverage=1.0, normalization_rule_name="nmt_nfkc", hard_vocab_limit=False,
    )  # fmt: skip
    model = tmp_path / "sp.model"
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    files = tokenizer_files(unigram_values(model), tmp_path / "m.gguf")
    ours = Tokenizer.from_str(files["tokenizer.json"])
    for each in (*TEXTS, *ODD):
        ids = [id + 1 if id else 3 for id in pieces.encode(each)]
        assert ours.encode(each).ids == [0, *ids, 2]
    assert ours.encode("a", "b").ids == [*ours.encode("a").ids, 2, *ours.encode("b").ids[1:]]
    assert set(ours.encode("a", "b").type_ids) == {0}
