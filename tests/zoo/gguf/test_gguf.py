"""GGUF files: weights and config against transformers, the tokenizer against the one it came from.

The files are written here with the package gguf, as llama.cpp's converter writes them; the formats
of K-quants and IQ4, for which the package has no quantiser, from random blocks.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from helpers import text_checkpoints
from helpers.gguf_files import CONFIGS, QUANTISED, packed, write
from helpers.model_harness import Runner, Sequence, load, make_reference, random_ids
from minisgl import env
from minisgl.core import SamplingParams
from minisgl.errors import CheckpointError, ConfigError
from minisgl.llm import LLM
from minisgl.tokenizer.tokenizer import load_tokenizer
from minisgl.utils.hf import resolve_checkpoint
from minisgl_zoo.gguf.folder import gguf_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path / "cache")


def logits_of(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and those of transformers' own reader, in float32."""
    prompt = random_ids(19, 3)
    with torch.inference_mode():
        sequence = Sequence(prompt, 1)
        Runner(load(resolve_checkpoint(str(path))), page_size=4).generate([sequence], chunk=32)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        for name in ("head_dim", "moe_intermediate_size", "norm_topk_prob"):
            if hasattr(config, name) and hasattr(CONFIGS["qwen3moe"], name):
                setattr(config, name, getattr(CONFIGS["qwen3moe"], name))  # it does not read these
        reference = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)
        missing, extra = reference.load_state_dict(read["tensors"], strict=False)
        assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
        assert not extra
        reference.tie_weights()
        return torch.cat(sequence.logits), reference(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("arch", CONFIGS)
def test_logits_are_those_of_the_model_it_came_from(arch: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", arch)
    prompt = random_ids(40, 3)
    sequence = Sequence(prompt, 1)
    with torch.inference_mode():
        Runner(load(resolve_checkpoint(str(tmp_path / "m.gguf"))), page_size=4).generate(
            [sequence], chunk=32
        )
        theirs = make_reference(CONFIGS[arch])(torch.tensor([prompt])).logits[0]
    ours = torch.cat(sequence.logits)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_experts_of_gpt_oss_stay_packed(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "gpt-oss", Kind.MXFP4)
    prompt = random_ids(40, 3)
    sequence = Sequence(prompt, 1)
    reference = make_reference(CONFIGS["gpt-oss"])
    for layer in reference.model.layers:
        for experts in (layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data):
            rows = experts.mT.contiguous().numpy()
            values = gguf.quants.dequantize(packed(rows, Kind.MXFP4), Kind.MXFP4)
            experts.copy_(torch.from_numpy(values).mT)
    folder = resolve_checkpoint(str(tmp_path / "m.gguf"))
    config = json.loads((folder / "config.json").read_text())
    assert set(config["quantization_config"]["types"].values()) == {"MXFP4"}
    with torch.inference_mode():
        Runner(load(folder), page_size=4).generate([sequence], chunk=32)
        theirs = reference(torch.tensor([prompt])).logits[0]
    ours = torch.cat(sequence.logits)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_logits_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", arch)
    ours, theirs = logits_of(tmp_path / "m.gguf")
    assert (ours[-1] - theirs[-1]).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", QUANTISED)
def test_formats_of_weights(name: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", QUANTISED[name])
    ours, theirs = logits_of(tmp_path / "m.gguf")
    assert torch.isfinite(theirs).all()
    assert (ours[-1] - theirs[-1]).abs().max() <= 1e-4 * theirs.abs().max()


def test_the_tokenizer_is_the_one_it_came_from(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3")
    ours = load_tokenizer(gguf_folder(tmp_path / "m.gguf"))
    theirs = load_tokenizer(tmp_path / "tokenizer")
    for text in (*text_checkpoints.SAMPLES, *text_checkpoints.CORPUS):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma"])
def test_sentencepiece(kind: str, tmp_path: Path) -> None:
    """Scores order merges as the merges of the tokenizer do that they come from."""
    from minisgl_zoo.gguf.tokenizer import tokenizer_files

    text_checkpoints.make(tmp_path, kind)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), rank)
    source = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    added = source.get_added_tokens_decoder()
    tokens += [source.id_to_token(i) for i in range(len(tokens), source.get_vocab_size())]
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    kinds[tokens.index("<unk>")] = 2
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(ranks.get(token, 10**6)) for token in tokens],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
        "tokenizer.ggml.add_space_prefix": kind == "sentencepiece",
    }
    ours = Tokenizer.from_str(tokenizer_files(values, tmp_path)["tokenizer.json"])
    for text in ("Hello world", "two  spaces ", "Grüße, 世界! 😀", "a" * 50, "\n\ttabs"):
        want = source.encode(text)
        assert ours.encode(text).ids == want.ids
        assert ours.decode(want.ids) == source.decode(want.ids)


def test_what_the_file_says_of_rotations(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    def llama3(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array([1, 1, 4, 8], np.float32))

    for name, change in (("yarn", yarn), ("llama3", llama3)):
        write(tmp_path / f"{name}.gguf", "llama", change=change)
        folder = gguf_folder(tmp_path / f"{name}.gguf")
        scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
        assert scaling["rope_type"] == name
        assert scaling["factor"] == (4.0 if name == "yarn" else 8.0)
        load(folder)


def test_a_file_is_served_from_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", "qwen3", Kind.Q8_0)
    folder = gguf_folder(tmp_path / "m.gguf")
    monkeypatch.undo()  # compiled kernels are in the cache
    monkeypatch.setattr("minisgl_zoo.gguf.folder.gguf_folder", lambda path: folder)
    with LLM(str(tmp_path / "m.gguf"), dtype="float32", num_pages=64, progress=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        (answer,) = llm.generate(["Hello world"], [params])
        assert len(answer.token_ids) == 4


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3")
    folder = resolve_checkpoint(str(tmp_path / "m.gguf"))
    made = (folder / "config.json").stat().st_mtime_ns
    assert gguf_folder(tmp_path / "m.gguf") == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert len(list((tmp_path / "cache" / "gguf").iterdir())) == 1


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises((CheckpointError, ConfigError), match=r"m\.gguf"):
        gguf_folder(path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'mamba' are not read"):
        gguf_folder(path)

    def split(writer: gguf.GGUFWriter) -> None:
        writer.add_uint16("split.count", 2)

    write(path, "qwen3", change=split)
    with pytest.raises(ConfigError, match="one of 2 parts by its metadata"):
        gguf_folder(path)


def test_a_merge_of_unknown_tokens_is_an_error_of_the_file(tmp_path: Path) -> None:
    def damage(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.merges"].value = ["no such"]

    write(tmp_path / "m.gguf", "llama", change=damage)
    with pytest.raises(CheckpointError, match=r"m\.gguf .* `no` out of vocabulary"):
        gguf_folder(tmp_path / "m.gguf")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error was that of an unreadable model."""
    path = tmp_path / "m.gguf"
    write(path, "llama")
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=r"cache/gguf cannot hold .*; MINISGL_CACHE_DIR names"):
        resolve_checkpoint(str(path))
    (tmp_path / "cache").unlink()
    folder = gguf_folder(path)
    (folder / "config.json").unlink()  # as if another process were making the folder
    assert gguf_folder(path) == folder
    assert list((tmp_path / "cache/gguf").iterdir()) == [folder]
