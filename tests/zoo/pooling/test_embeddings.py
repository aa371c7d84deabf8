"""Embeddings and scores of `LLM`: those of transformers, for each pooling and spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.adapters import RandomAdapter
from helpers.embedders import (
    CONFIGS,
    QUERY,
    TEXTS,
    Config,
    cosines,
    embeddings_of,
    later,
    older,
    save_embedder,
    save_reranker,
    scores_of,
    tokenizer_with,
)
from helpers.model_harness import make_reference
from minisgl.errors import CheckpointError, InvalidRequest, InvalidSampling, PromptTooLong
from minisgl.llm import LLM, SamplingParams
from minisgl.message import TextPrompt
from minisgl_zoo.pooling.recipe import Recipe

CLOSE = 0.99999
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 128, "progress": False}


def llm_of(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **OPTIONS | {"max_prefill_length": 64} | options)


@pytest.mark.parametrize(("is_encoder", "most"), [(True, 32), (False, 31)])
def test_a_text_is_cut_to_what_the_engine_takes(is_encoder: bool, most: int) -> None:
    recipe = Recipe(folder=Path(), size=4, is_encoder=is_encoder)
    asked = recipe.embed([TextPrompt(text="a")], max_tokens=-1, context=32)
    assert asked.sampling.truncate_prompt_tokens == most


def test_a_checkpoint_may_have_a_prompt_for_texts_without_another() -> None:
    prompts = {"query": "q: ", "document": "d: "}
    for default, expected in (("document", "d: a"), (None, "a")):
        recipe = Recipe(folder=Path(), size=4, prompts=prompts, default=default)
        for name, begun in ((None, expected), ("query", "q: a")):
            (text,) = recipe.embed([TextPrompt(text="a")], prompt_name=name).prompts
            assert text == TextPrompt(text=begun)


def test_wrong_types_are_refused_by_name() -> None:
    recipe = Recipe(folder=Path(), size=4, is_embedder=True, longest=9, prompts={"query": "q: "})
    wrong: Any
    for wrong in (5, None, "text", iter(["text"]), {"text": 1}, [1]):
        with pytest.raises(InvalidRequest, match="query must be a list of texts"):
            recipe.rank(wrong, ["d"])
        with pytest.raises(InvalidRequest, match="documents must be a list of texts"):
            recipe.rank(["q"], wrong)
    with pytest.raises(InvalidRequest, match="instruction must be a text, got 5"):
        recipe.rank(["q"], ["d"], instruction=5)  # type: ignore[arg-type] # what is tested
    texts = [TextPrompt(text="a")]
    for name, refused in (
        ("max_tokens", [1.5, "x", True]),
        ("prompt_name", [5, []]),
        ("dimensions", [True, 1.0]),
    ):
        for wrong in refused:
            with pytest.raises((InvalidRequest, InvalidSampling), match=r"must be|has no prompt"):
                recipe.embed(texts, **{name: wrong})


@pytest.mark.parametrize(
    ("family", "architecture", "config", "mode"),
    [
        ("qwen3", "Qwen3ForCausalLM", older("lasttoken"), "lasttoken"),  # Qwen3-Embedding
        ("mistral", "MistralModel", older("lasttoken"), "lasttoken"),  # E5-Mistral
        ("qwen2", "Qwen2Model", later("mean"), "mean"),
        ("llama", "LlamaModel", later("cls"), "cls"),
        ("qwen3", "Qwen3Model", older("mean"), "mean"),
    ],
)
def test_the_embeddings_of_each_spelling_are_those_of_transformers(
    family: str, architecture: str, config: Config, mode: str, tmp_path: Path
) -> None:
    folder = save_embedder(tmp_path / "m", family, pooling=config, architecture=architecture)
    with llm_of(folder) as llm:
        ours = llm.embed(TEXTS)
        asked = llm.embed(TEXTS, prompt_name="query")
    assert ours.dtype == np.float32
    assert cosines(ours, embeddings_of(folder, TEXTS, mode)).min() >= CLOSE
    with_prompt = [QUERY + text for text in TEXTS]
    assert cosines(asked, embeddings_of(folder, with_prompt, mode)).min() >= CLOSE
    assert np.allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_chunks_prefixes_batches_and_retraction_change_nothing(
    pooling: Any, tmp_path: Path
) -> None:
    folder = save_embedder(tmp_path / "m", pooling=older("lasttoken"))
    mode = {"last": "lasttoken"}.get(pooling, pooling)
    whole = embeddings_of(folder, TEXTS, mode)
    with llm_of(folder, max_prefill_length=16, page_size=4, num_pages=60) as llm:
        batch = llm.embed(TEXTS, pooling=pooling)  # chunks, more prompts than pages
        again = llm.embed(TEXTS, pooling=pooling)  # with cached prefixes
        single = np.concatenate([llm.embed(text, pooling=pooling) for text in TEXTS])
        ids = [llm.tokenizer.encode(text) for text in TEXTS]
        of_ids = llm.embed(ids, pooling=pooling)
    for ours in (batch, again, single, of_ids):
        assert cosines(ours, whole).min() >= CLOSE


def test_a_vector_that_is_not_normalised_keeps_its_length(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "m", pooling=older("mean"), normalises=False)
    with llm_of(folder) as llm:
        ours = llm.embed(TEXTS)
    assert np.allclose(ours, embeddings_of(folder, TEXTS, "mean", normalises=False), atol=1e-4)


def test_dimensions_are_the_first_ones_normalised_again(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "m", pooling=older("lasttoken"))
    with llm_of(folder) as llm:
        whole, part = llm.embed(TEXTS), llm.embed(TEXTS, dimensions=12)
        with pytest.raises(InvalidRequest, match="dimensions must be 1 to 48, got 49"):
            llm.embed("a", dimensions=49)
    first = whole[:, :12]
    assert np.allclose(part, first / np.linalg.norm(first, axis=1, keepdims=True), atol=1e-6)


def test_answers_and_embeddings_share_steps_and_the_cache(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "m")
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with llm_of(folder) as llm:
        alone, vectors = llm.generate(TEXTS, greedy), llm.embed(TEXTS)
        pooled = SamplingParams(pooling="last")
        both = llm.generate(
            [text for text in TEXTS for _ in range(2)], [greedy, pooled] * len(TEXTS)
        )
    assert [output.token_ids for output in both[::2]] == [output.token_ids for output in alone]
    assert all(output.token_ids == [] and output.num_output_tokens == 0 for output in both[1::2])
    rows = np.stack([np.frombuffer(output.pooled, "<f4") for output in both[1::2]])
    assert cosines(rows, vectors).min() >= CLOSE
    assert max(output.num_cached_tokens for output in both[1::2]) > 0


def test_a_reranker_scores_as_its_model_card_does(tmp_path: Path) -> None:
    folder, task = save_reranker(tmp_path / "m"), "Find the capital"
    with llm_of(folder, max_seq_len=512) as llm:
        ours = llm.score(TEXTS[0], TEXTS[1:], instruction=task)
    assert ours == pytest.approx(scores_of(folder, TEXTS[0], TEXTS[1:], task), abs=1e-5)


def test_a_template_with_roles_gets_them(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "m")
    template = (
        "{{ messages[0].content }}|"
        "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}|"
        "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    (folder / "1_LogitScore").mkdir()
    labels = {"true_token_id": 300, "false_token_id": 301}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(labels))
    with llm_of(folder) as llm:
        [score] = llm.score("q", ["d"], instruction="i")
        sampling = SamplingParams(pooling="last", logit_ids=(300, 301))
        [output] = llm.generate("i|q|d", sampling)
    yes, no = np.frombuffer(output.pooled, "<f4")
    assert score == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-6)


def test_an_embedder_ranks_by_cosine(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "m", pooling=older("lasttoken"))
    with llm_of(folder) as llm:
        scores = llm.score(TEXTS[0], TEXTS)
        with pytest.raises(InvalidRequest, match="instruction is for rerankers"):
            llm.score("q", ["d"], instruction="i")
        wrong: Any
        for wrong in ("document", [5], [["d"]]):
            with pytest.raises(InvalidRequest, match="documents must be a list of texts"):
                llm.score("q", wrong)
    [query] = embeddings_of(folder, [QUERY + TEXTS[0]], "lasttoken")
    assert scores == pytest.approx(embeddings_of(folder, TEXTS, "lasttoken") @ query, abs=1e-5)


def test_an_adapter_changes_the_embeddings_of_its_requests(tmp_path: Path) -> None:
    folder, whole = save_reranker(tmp_path / "m"), make_reference(CONFIGS["qwen3"])
    adapter = RandomAdapter.of(tmp_path / "a", whole, seed=1)
    with adapter.merged(whole) as merged:
        merged.save_pretrained(tmp_path / "merged")
    tokenizer_with(tmp_path / "merged", eos=False)
    with llm_of(folder, lora={"a": adapter.folder}) as llm:
        plain, adapted = llm.embed(TEXTS), llm.embed(TEXTS, lora="a")
        means = llm.embed(TEXTS, lora="a", pooling="mean")
    assert cosines(plain, embeddings_of(folder, TEXTS, "lasttoken")).min() >= CLOSE
    assert cosines(adapted, embeddings_of(tmp_path / "merged", TEXTS, "lasttoken")).min() >= CLOSE
    assert cosines(means, embeddings_of(tmp_path / "merged", TEXTS, "mean")).min() >= CLOSE


def test_no_text_has_no_embedding(tmp_path: Path) -> None:
    with llm_of(save_embedder(tmp_path / "m", pooling=older("mean"))) as llm:
        assert (llm.embed([]).size, llm.score("a", [])) == (0, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"1_Pooling/config.json": older("max")}, "the pooling max is not supported"),
        ({"1_Pooling/config.json": later("mean") | {"include_prompt": False}}, "include_prompt"),
        (
            {
                "modules.json": [
                    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
                    {"path": "2_CNN", "type": "sentence_transformers.models.CNN"},
                ]
            },
            "has the modules CNN",
        ),
    ],
)
def test_a_recipe_that_is_not_followed_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = save_embedder(tmp_path / "m", pooling=older("mean"))
    for name, content in change.items():
        (folder / name).write_text(json.dumps(content))
    with llm_of(folder) as llm, pytest.raises(CheckpointError, match=says):
        llm.embed("a")


def test_attention_in_both_directions_is_refused(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "m", "qwen2", pooling=older("lasttoken"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))  # GTE-Qwen2
    with llm_of(folder) as llm, pytest.raises(CheckpointError, match="both directions"):
        llm.embed("a")


def test_what_cannot_be_embedded_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "m", pooling=older("mean"))
    with llm_of(folder) as llm:
        with pytest.raises(InvalidRequest, match="no prompt 'passage'; it has query, document"):
            llm.embed("a", prompt_name="passage")
        wrong: Any
        for wrong in (0, "8", 1.5, 10**9):
            with pytest.raises(InvalidRequest, match="dimensions must be 1 to "):
                llm.embed("a", dimensions=wrong)
        with pytest.raises(InvalidRequest, match="prompt 1: the prompt is empty"):
            llm.embed(["a", ""])
        with pytest.raises(PromptTooLong, match="prompt 1: the prompt has"):
            llm.embed(["a", "word " * 600])
        with pytest.raises(InvalidSampling, match="logit_ids must be between 0 and 400, got 401"):
            llm.generate("a", SamplingParams(pooling="last", logit_ids=(401,)))
    with pytest.raises(InvalidSampling, match="pooling must be last, mean or cls, got 'max'"):
        SamplingParams(pooling="max")
    with pytest.raises(InvalidSampling, match="logit_ids are of one token"):
        SamplingParams(pooling="mean", logit_ids=(1,))
    with pytest.raises(InvalidSampling, match="logit_ids needs pooling"):
        SamplingParams(logit_ids=(1,))
    with pytest.raises(InvalidSampling, match="echo needs an output"):
        SamplingParams(pooling="mean", echo=True)
