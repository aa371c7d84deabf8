"""GGUF files: weights and config against transformers, the tokenizer against the one it came from.

The files are written here with the package gguf, as llama.cpp's converter writes them; the formats
of K-quants and IQ4, for which the package has no quantiser, from random blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import minisgl.utils.gguf
from helpers import text_checkpoints
from helpers.model_harness import Runner, Sequence, load, make_reference, random_ids
from minisgl import env
from minisgl.core import SamplingParams
from minisgl.errors import CheckpointError, ConfigError
from minisgl.llm import LLM
from minisgl.models.gguf import GLOBAL, OF_ARCHITECTURE, OF_EXPERTS, OF_LAYER, PLUS_ONE
from minisgl.tokenizer.tokenizer import load_tokenizer
from minisgl.utils.gguf import gguf_folder
from minisgl.utils.hf import resolve_checkpoint

VOCAB = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,  # K-quants have blocks of 256
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rope_theta": 5e4,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
        decoder_sparse_step=1, norm_topk_prob=True,
    ),
    "gemma2": Gemma2Config(
        **{**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True, "sliding_window": 8},
        query_pre_attn_scalar=64, attention_dropout=0.0,
    ),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7, "tie_word_embeddings": True, "sliding_window": 8},
        query_pre_attn_scalar=64,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt-oss": GptOssConfig(
        **{**SIZES, "sliding_window": 8}, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "truncate": False,
            "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32,
        },
    ),
}  # fmt: skip
QUANTISED = {
    "F16": Kind.F16,
    "BF16": Kind.BF16,
    "Q8_0": Kind.Q8_0,
    "Q4_0": Kind.Q4_0,
    "Q5_1": Kind.Q5_1,
    "Q4_K": Kind.Q4_K,
    "Q5_K": Kind.Q5_K,
    "Q6_K": Kind.Q6_K,
    "IQ4_NL": Kind.IQ4_NL,
    "IQ4_XS": Kind.IQ4_XS,
}
PLACES = {
    Kind.Q4_K: ((0, 0.002), (2, 0.01)),
    Kind.Q5_K: ((0, 0.001), (2, 0.01)),
    Kind.Q6_K: ((208, 0.0001),),
    Kind.IQ4_NL: ((0, 0.001),),
    Kind.IQ4_XS: ((0, 0.00004),),
}
"""Of the float16 factors in a block, and what keeps weights small."""


def packed(values: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """The blocks of such values; random ones where the package cannot quantise."""
    if kind not in PLACES:
        return gguf.quants.quantize(values, kind)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    per_block = gguf.GGML_QUANT_SIZES[kind][0]
    rng = np.random.default_rng(values.shape[0])
    shape = (*values.shape[:-1], values.shape[-1] // per_block, size)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    for place, factor in PLACES[kind]:
        factors = (rng.random((*shape[:-1], 1)) * factor).astype(np.float16)
        blocks[..., place : place + 2] = factors.view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter permutes q and k of Llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


Change = Callable[[gguf.GGUFWriter], None]


def write(path: Path, arch: str, kind: Kind = Kind.F32, change: Change | None = None) -> None:
    """A file of a random model, with the tokenizer of `text_checkpoints`."""
    config: Any = CONFIGS[arch]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 64)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5e4)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if "sliding_window" in config.to_dict() and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    if arch == "gpt-oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
    add_tokenizer(writer, path.parent / "tokenizer")
    if change:
        change(writer)
    tensors = make_reference(config).state_dict()
    names = {new: old for old, new in GLOBAL.items()}
    for layer in range(config.num_hidden_layers):
        names |= {
            f"model.layers.{layer}.{new}": f"blk.{layer}.{old}"
            for old, new in {**OF_LAYER, **OF_ARCHITECTURE.get(arch, {})}.items()
        }
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        values = tensor.float().numpy()
        if ".mlp.experts." in name:
            continue
        if config.tie_word_embeddings and module == "lm_head":
            continue
        if name.endswith(".sinks"):
            module, suffix = name, "weight"
        if arch in PLUS_ONE and "norm" in module:
            values = values + 1
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            values = interleave(values, heads)
        add(writer, f"{names[module]}.{suffix}", values, kind)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        for suffix, end in (("weight", ""), ("bias", "_bias")):
            if f"{prefix}.gate_up_proj{end}" not in tensors:
                continue
            gate_up = tensors[f"{prefix}.gate_up_proj{end}"].float().numpy()
            down = tensors[f"{prefix}.down_proj{end}"].float().numpy()
            if arch == "gpt-oss":
                gate_up, down = (x if end else x.swapaxes(1, 2) for x in (gate_up, down))
                gate, up = gate_up[:, ::2], gate_up[:, 1::2]
            else:
                gate, up = np.split(gate_up, 2, 1)
            for name, values in zip(OF_EXPERTS, (gate, up, down), strict=True):
                values = np.ascontiguousarray(values)
                add(writer, f"blk.{layer}.{name}.{suffix}", values, Kind.F32 if end else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: Kind) -> None:
    is_plain = kind == Kind.MXFP4 and "_exps.weight" not in name  # as llama.cpp's converter does
    if values.ndim == 1 or kind == Kind.F32 or "ffn_gate_inp" in name or is_plain:
        writer.add_tensor(name, values)
    elif kind == Kind.F16:
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, packed(values, kind), raw_dtype=kind)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    text_checkpoints.make(folder, "byte_level")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    count = tokenizer.get_vocab_size()
    assert count <= VOCAB
    tokens = [str(tokenizer.id_to_token(i)) for i in range(count)]
    added = tokenizer.get_added_tokens_decoder()
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(count)]
    fill = VOCAB - count
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(fill)])
    writer.add_token_types(kinds + [5] * fill)
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in model["merges"]])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


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
    assert config["quantization_config"] == {"quant_method": "mxfp4"}
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
    from minisgl.utils.gguf_tokenizer import tokenizer_files

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
    monkeypatch.setattr(minisgl.utils.gguf, "gguf_folder", lambda path: folder)
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
    with pytest.raises(ConfigError, match="one of 2 parts"):
        gguf_folder(path)
