"""Encoders: the vectors of transformers, in steps that cut no prompt and cache nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from helpers.embedders import (
    IDENTITY,
    QUERY,
    TEXTS,
    cosines,
    embeddings_of,
    later,
    older,
    save_encoder,
)
from helpers.scheduling import add, make, spans
from minisgl.core import Finished, StepResult
from minisgl.core.args import EngineConfig
from minisgl.errors import CheckpointError, ConfigError, InvalidRequest, PromptTooLong
from minisgl.llm import LLM, SamplingParams
from minisgl.message import TextPrompt
from minisgl.models.loading.reading import read_config
from minisgl.models.registry import spec_of
from minisgl_zoo.blocks import encoder
from minisgl_zoo.blocks.encoder import check_options, distance_buckets
from minisgl_zoo.pooling.dense import read_dense
from minisgl_zoo.pooling.recipe import read_recipe

SHORT = [*(text[:40] for text in TEXTS), "the same the"]
RELEASED: dict[str, dict[str, str]] = {
    "nomic": {
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon",
    },
    "modernbert": {},
    "gemma": {},
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "nomic": {
        "activation_function": "swiglu", "hidden_act": None, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_scaling_factor": None,
        "prenorm": False, "qkv_proj_bias": False, "n_positions": 8192,
    },
    "modernbert": {
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0, "position_embedding_type": "absolute",
    },
    "gemma": {
        "_sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
    },
}  # fmt: skip
"""How nomic-embed-text-v1.5, gte-modernbert-base and embeddinggemma-300m name what transformers
names otherwise."""
NEEDED = r"model\.safetensors must have linear\.weight"
TANH = "torch.nn.modules.activation.Tanh"
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("m") / "bert", pooling=older("mean"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def test_the_vectors_are_those_of_transformers_in_any_batch(llm: LLM, folder: Path) -> None:
    expected = embeddings_of(folder, SHORT, "mean")
    batch, again = llm.embed(SHORT), llm.embed(SHORT)
    single = np.concatenate([llm.embed(text) for text in SHORT])
    of_ids = llm.embed([llm.tokenizer.encode(text) for text in SHORT])
    many = llm.embed(SHORT * 50)[-len(SHORT) :]  # several steps
    for ours in (batch, again, single, of_ids, many):
        assert cosines(ours, expected).min() >= 0.99999
    for pooling, mode in (("cls", "cls"), ("last", "lasttoken")):
        assert (
            cosines(llm.embed(SHORT, pooling=pooling), embeddings_of(folder, SHORT, mode)).min()
            >= 0.99999
        )


@pytest.mark.parametrize(
    ("kind", "pooling", "mode"),
    [
        ("xlm-roberta", older("mean"), "mean"),
        ("bert", later("cls"), "cls"),
        ("bert", None, "mean"),
        ("mpnet", older("mean"), "mean"),
        ("nomic", older("mean"), "mean"),
        ("modernbert", later("cls"), "cls"),  # the texts are longer than its windows
        ("gemma", older("mean"), "mean"),
    ],
)
def test_each_spelling(kind: str, pooling: Any, mode: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", kind, pooling=pooling, normalises=False)
    with LLM(folder, **OPTIONS) as llm:
        ours = llm.embed(SHORT)
    expected = embeddings_of(folder, SHORT, mode, normalises=False)
    assert np.allclose(ours, expected, atol=1e-5)
    assert read_recipe(folder).is_embedder
    if kind not in RELEASED:
        return
    config = json.loads((folder / "config.json").read_text())
    fields = {new: config.pop(old) for old, new in RELEASED[kind].items()}
    config.pop("rope_parameters")
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config | fields | OWN[kind]))
    with LLM(folder, **OPTIONS) as llm:
        assert np.array_equal(llm.embed(SHORT), ours)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "gemma", "mpnet"])
def test_a_kernel_for_texts_of_any_lengths(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU has. One of its arguments is the window on each side; it has no bias."""
    num_rows: list[int] = []

    def varlen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, firsts: torch.Tensor, *others: Any,
        scale: float | None, window_size: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        num_rows.append(len(firsts) - 1)
        assert others[1] == others[2] == int(firsts.diff().max())
        out = torch.empty_like(q)
        for first, end in pairwise(firsts.tolist()):
            places = torch.arange(end - first)
            apart = (places - places[:, None]).abs()
            seen = apart <= (window_size[0] if window_size[0] >= 0 else end)
            parts = (x[first:end].transpose(0, 1) for x in (q, k, v))
            read = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale)
            out[first:end] = read.transpose(0, 1)
        return out

    monkeypatch.setattr(encoder, "_varlen", lambda build, head_dim: varlen)
    folder = save_encoder(tmp_path / "m", kind, pooling=older("mean"))
    with LLM(folder, **OPTIONS) as llm:
        num_rows.clear()
        assert cosines(llm.embed(SHORT), embeddings_of(folder, SHORT, "mean")).min() >= 0.99999
    assert num_rows[:1] == ([] if kind == "mpnet" else [len(SHORT)])


def test_embeddinggemma(tmp_path: Path) -> None:
    """Windows of 4 tokens on each side, layers behind the pooling, fewer dimensions."""
    folder = save_encoder(tmp_path / "m", "gemma", pooling=older("mean"), dense=(96, 32))
    expected = embeddings_of(folder, SHORT, "mean")
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 8
    with LLM(folder, **OPTIONS) as llm:
        for ours in (llm.embed(SHORT), np.concatenate([llm.embed(text) for text in SHORT])):
            assert cosines(ours, expected).min() >= 0.99999
        first = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
        assert np.allclose(llm.embed(SHORT, dimensions=8), first, atol=1e-5)
        with pytest.raises(InvalidRequest, match="dimensions must be 1 to 32"):
            llm.embed("a", dimensions=33)
        with pytest.raises(InvalidRequest, match="this model is an encoder"):
            llm.generate("a")
        with pytest.raises(InvalidRequest, match="this model is an encoder"):
            llm.chat([{"role": "user", "content": "a"}])
        [score] = llm.score("a", ["b"])
        pair = embeddings_of(folder, [QUERY + "a", "b"], "mean")
        assert score == pytest.approx(float(pair[0] @ pair[1]), abs=1e-5)
        assert llm._engine.engine.memory.kv_bytes == 0


def test_each_spelling_of_a_dense_layer(tmp_path: Path) -> None:
    weight, bias = torch.randn(3, 4), torch.randn(3)
    x = torch.randn(2, 4)
    config: dict[str, Any] = {"in_features": 4, "out_features": 3, "bias": True}
    for name, activation in ((IDENTITY, torch.nn.Identity()), (TANH, torch.tanh)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            stored = {"linear.weight": weight.to(dtype), "linear.bias": bias.to(dtype)}
            save_file(stored, tmp_path / "model.safetensors")
            (tmp_path / "config.json").write_text(
                json.dumps(config | {"activation_function": name})
            )
            layer = read_dense(tmp_path)
            expected = activation(x @ weight.to(dtype).float().T + bias.to(dtype).float())
            assert np.allclose(layer(x.numpy()), expected.numpy(), atol=1e-6)
            assert layer.weight_OI.shape == (3, 4)
    (tmp_path / "config.json").write_text(json.dumps(config | {"activation_function": "my.Odd"}))
    with pytest.raises(CheckpointError, match=r"pass through my\.Odd, which is not"):
        read_dense(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"activation_function": TANH}))
    for content in (b"", b"nonsense"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=NEEDED):
            read_dense(tmp_path)
    save_file({"linear.bias": bias}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=NEEDED):
        read_dense(tmp_path)


def test_distances_fall_into_the_buckets_of_transformers() -> None:
    apart = torch.arange(-600, 600)
    for buckets in (32, 64):
        theirs = MPNetEncoder.relative_position_bucket(apart, num_buckets=buckets)
        assert torch.equal(distance_buckets(apart, buckets), theirs)


def test_a_prompt_may_fill_the_context(llm: LLM, folder: Path) -> None:
    ids = llm.tokenizer.encode(TEXTS[2])
    assert len(ids) > 33
    whole = [[*ids[:31], ids[-1]]]
    vector = llm.embed(TEXTS[2], truncate_prompt_tokens=-1)
    assert np.abs(vector - llm.embed(whole)).max() < 1e-6
    with pytest.raises(PromptTooLong, match="33 tokens"):
        llm.embed([ids[:33]])


def test_a_text_is_cut_to_the_pool_if_that_is_smaller_than_the_context() -> None:
    with LLM(dtype="float32", num_pages=6, progress=False) as llm:
        ids = [7] * 95
        cut = llm.embed([ids * 2], truncate_prompt_tokens=-1)
        assert np.abs(cut - llm.embed([ids])).max() < 1e-6


def test_pages_are_free_at_once_and_weigh_nothing(llm: LLM) -> None:
    engine, cache = llm._engine.engine, llm._engine.scheduler.requests.cache
    assert (engine.memory.kv_bytes, engine.max_prefill_tokens) == (0, 256)
    llm.embed(SHORT)
    assert (cache.num_used_pages, cache.num_cached_pages) == (0, 0)


@pytest.mark.parametrize("num_pages", [64, 5])
def test_a_prompt_is_one_chunk(num_pages: int) -> None:
    sizes = {"num_pages": num_pages, "max_prefill_tokens": 20, "max_seq_len": 20}
    scheduler = make(is_encoder=True, cache="naive", **sizes)
    for uid, length in enumerate((9, 9, 9, 20, 1)):
        add(scheduler, uid, [1] * length, pooling="mean")
    steps = []
    while scheduler.runnable:
        plan = scheduler.plan()
        steps.append(spans(plan))
        rows = [np.ones(2, np.float32)] * len(plan.pooled)
        events = scheduler.commit(
            plan, StepResult(next_ids=[0] * len(plan.sample_rows), pooled=rows)
        )
        assert sum(isinstance(event, Finished) for event in events) == len(plan.uids)
    whole = [(0, 0, 9), (1, 0, 9), (2, 0, 9), (3, 0, 20), (4, 0, 1)]
    assert [span for step in steps for span in step] == whole
    assert num_pages == 5 or len(steps) == 4
    assert scheduler.requests.cache.num_used_pages == 0


def test_an_encoder_writes_nothing(llm: LLM) -> None:
    for sampling in (SamplingParams(), SamplingParams(max_tokens=0, echo=True)):
        with pytest.raises(InvalidRequest, match="this model is an encoder"):
            llm.generate("a", sampling)
    with pytest.raises(InvalidRequest, match="is an encoder"):
        llm.generate("a", SamplingParams(pooling="last", logit_ids=(3,)))


def test_files_of_other_tasks_are_read(folder: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for file in folder.rglob("*.json"):
        target = tmp_path / "m" / file.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file.read_bytes())
    tensors = {f"bert.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
    tensors["cls.predictions.bias"] = torch.zeros(200)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    sizes = {"max_seq_length": 16, "do_lower_case": True}
    (tmp_path / "m" / "sentence_bert_config.json").write_text(json.dumps(sizes))
    with LLM(tmp_path / "m", **OPTIONS) as other:
        assert np.array_equal(other.embed(SHORT), llm.embed(SHORT))
    recipe = read_recipe(tmp_path / "m")
    asked = recipe.embed([TextPrompt(text="Ab")], max_tokens=-1, context=32)
    assert asked.sampling.truncate_prompt_tokens == 16
    assert asked.prompts == [TextPrompt(text="ab")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be absolute"),
        ({"is_decoder": True}, "is_decoder must be false"),
        ({"hidden_act": "relu"}, "hidden_act must be one of gelu"),
        (
            {"architectures": ["NomicBertModel"], "num_experts": 8, "hidden_act": "silu"},
            "num_experts must be 0: other",
        ),
        (
            {"architectures": ["ModernBertModel"], "attention_bias": True},
            "mlp_bias is missing; expected equal to attention_bias",
        ),
        (
            {"architectures": ["Gemma3TextModel"], "hidden_act": "gelu_pytorch_tanh"},
            "use_bidirectional_attention is missing; expected true for Gemma3TextModel",
        ),
    ],
)
def test_an_encoder_that_is_not_served(
    change: dict[str, Any], says: str, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        spec_of(read_config(tmp_path))


def test_what_an_encoder_has_not_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="an encoder has no --tp, --attn, --num-pages; leave"):
        check_options(EngineConfig(model=str(folder), tp=2, attn="torch", num_pages=9))
