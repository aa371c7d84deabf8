"""Cross-encoders: the scores of transformers' classes, as sentence-transformers releases them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.embedders import TEXTS, pair_logits, save_encoder
from minisgl.errors import CheckpointError, ConfigError, InvalidRequest, PromptTooLong
from minisgl.llm import LLM, SamplingParams
from minisgl.message import TextPrompt
from minisgl.models.loading.reading import read_config
from minisgl.models.registry import spec_of
from minisgl_zoo.pooling.recipe import read_recipe

QUERY, DOCUMENTS = TEXTS[0], [text[:20] for text in TEXTS]
PAIRS = [(QUERY, document) for document in DOCUMENTS]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "progress": False}
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("m") / "bert", labels=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def released(folder: Path, **fields: Any) -> Path:
    """Change fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def test_scores_are_those_of_transformers_in_any_batch(llm: LLM, folder: Path) -> None:
    expected = pair_logits(folder, PAIRS).sigmoid().tolist()
    assert max(expected) - min(expected) > 1e-3
    assert llm.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-6)
    assert llm.score([QUERY] * 60, DOCUMENTS * 10)[-6:] == pytest.approx(expected, abs=1e-6)
    singles = [llm.score(QUERY, [document])[0] for document in DOCUMENTS]
    assert singles == pytest.approx(expected, abs=1e-6)
    [empty] = pair_logits(folder, [(QUERY, "")]).sigmoid().tolist()
    assert llm.score(QUERY, [""]) == pytest.approx([empty], abs=1e-6)
    other = pair_logits(folder, [("a", DOCUMENTS[0]), (QUERY, DOCUMENTS[1])]).sigmoid().tolist()
    assert llm.score(["a", QUERY], DOCUMENTS[:2]) == pytest.approx(other, abs=1e-6)


def test_two_separators_and_one_type(tmp_path: Path) -> None:
    """XLM-RoBERTa's names, tokenizer and MS MARCO's activation."""
    folder = save_encoder(tmp_path / "m", "xlm-roberta", labels=1)
    released(folder, sbert_ce_default_activation_function=IDENTITY)
    with LLM(folder, **OPTIONS) as llm:
        assert len(llm.tokenizer.backend.encode("a", "b").ids) == 6
        ours = llm.score(QUERY, DOCUMENTS)
    assert ours == pytest.approx(pair_logits(folder, PAIRS).tolist(), abs=1e-5)


def test_a_head_behind_the_mean(tmp_path: Path) -> None:
    """GTE's reranker: a ModernBERT whose head has a norm and no bias."""
    folder = save_encoder(tmp_path / "m", "modernbert", labels=1)
    with LLM(folder, **OPTIONS) as llm:
        ours = llm.score(QUERY, DOCUMENTS)
    expected = pair_logits(folder, PAIRS).sigmoid().tolist()
    assert ours == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "saved", "score"),
    [
        ({}, {}, torch.sigmoid),
        ({"sbert_ce_default_activation_function": None}, {}, torch.sigmoid),
        ({"sbert_ce_default_activation_function": IDENTITY}, {}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": TANH, "version": "4.1.0"}}, {}, torch.tanh),
        ({"sbert_ce_default_activation_function": IDENTITY}, {"activation_fn": TANH}, torch.tanh),
    ],
)
def test_each_spelling_of_the_activation(
    fields: dict[str, Any], saved: dict[str, Any], score: Any, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(saved))
    asked = read_recipe(released(tmp_path, **fields)).rank(["q"], ["d"])
    for value in (torch.tensor(-2.5), torch.tensor(1.25)):
        assert asked.finish([value.numpy().tobytes()]) == pytest.approx([float(score(value))])


def test_a_document_is_cut_to_the_context(llm: LLM, folder: Path) -> None:
    long = "the capital of china " * 20
    with pytest.raises(
        PromptTooLong, match="maximum context length is 32 tokens; the prompt is too long"
    ):
        llm.score(QUERY, [long])
    [score] = llm.score(QUERY, [long], truncate_prompt_tokens=-1)
    ids = llm.tokenizer.backend.encode(QUERY, long).ids
    cut = SamplingParams(pooling="cls", logit_ids=(0,))
    [output] = llm.generate([[*ids[:31], ids[-1]]], cut)
    asked = read_recipe(folder).rank([QUERY], [long])
    assert asked.finish([output.pooled]) == pytest.approx([score])
    llm.score("a", [long], truncate_prompt_tokens=5)  # one token of the document
    with pytest.raises(InvalidRequest, match="4 tokens are not the document's, so a cut to 4"):
        llm.score("a", [long], truncate_prompt_tokens=4)
    with pytest.raises(InvalidRequest, match="tokens are not the document's, so a cut to 32"):
        llm.score(long, ["a"], truncate_prompt_tokens=-1)


def test_of_a_document_that_is_far_too_long_the_start_is_encoded(llm: LLM) -> None:
    prompt = TextPrompt(text=QUERY, pair="the capital of china " * 2000)
    cut = SamplingParams(pooling="cls", logit_ids=(0,), truncate_prompt_tokens=32)
    part = llm._encoder.encode(prompt, 32, "first")
    assert len(part.ids) // 4 < 200
    requests = [llm._encoder.request(each, cut, "") for each in (part, llm._encoder.encode(prompt))]
    assert requests[0] == requests[1]
    with pytest.raises(PromptTooLong, match="the prompt is too long"):
        llm._encoder.encode(prompt, 32)
    with pytest.raises(PromptTooLong, match="the prompt is too long"):
        llm._encoder.encode(TextPrompt(text=prompt.pair or "", pair="a"), 32, "first")


def test_what_a_cross_encoder_has_not_is_refused(llm: LLM, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="it scores pairs of texts"):
        llm.embed("a")
    with pytest.raises(InvalidRequest, match="instruction is for rerankers that read one"):
        llm.score("q", ["d"], instruction="i")
    with pytest.raises(InvalidRequest, match=r"must not have \[SEP\], which ends it"):
        llm.score("a [SEP] b", ["d"])
    for sampling in (SamplingParams(), SamplingParams(pooling="cls", logit_ids=(1,))):
        with pytest.raises(InvalidRequest, match="this model is an encoder"):
            llm.generate("a", sampling)
    assert not read_recipe(folder).is_embedder
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"pass through my\.Softplus, which is not supported"):
        read_recipe(released(tmp_path, sentence_transformers={"activation_fn": "my.Softplus"}))
    with pytest.raises(ConfigError, match="one label, which is a score: it classifies into 3"):
        spec_of(read_config(released(tmp_path, id2label={"0": "a", "1": "b", "2": "c"})))
