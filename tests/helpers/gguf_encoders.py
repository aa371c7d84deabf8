"""GGUF files of the encoders of `helpers.embedders`, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer


def write_encoder(
    folder: Path, file: Path, pooling: gguf.PoolingType, kind: Kind = Kind.F32
) -> Path:
    """Convert the checkpoint in `folder`. The names are those of the package gguf."""
    config = json.loads((folder / "config.json").read_text())
    is_nomic, is_gemma = (config["model_type"] == name for name in ("nomic_bert", "gemma3_text"))
    offset = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    arch = gguf.MODEL_ARCH.NOMIC_BERT if is_nomic else gguf.MODEL_ARCH.BERT
    arch = gguf.MODEL_ARCH.GEMMA_EMBEDDING if is_gemma else arch
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_pooling_type(pooling)
    if is_gemma:
        _add_gemma(writer, config)
    else:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_causal_attention(False)
        writer.add_token_type_count(config["type_vocab_size"])
    if is_nomic:
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_wordpiece(writer, folder, config["vocab_size"])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        values, short = tensor.numpy(), name.removeprefix("roberta.").removeprefix("bert.")
        if is_gemma:
            values, short = values + name.endswith("norm.weight"), f"model.{short}"
        if short.startswith("pooler.") or short.endswith("position_ids"):
            continue
        if "position_embeddings" in short:
            values = np.ascontiguousarray(values[offset:])
        own = names.get_name(short, (".weight", ".bias"))
        assert own, name
        if kind == Kind.F32 or values.ndim == 1 or "_types" in own or "position" in own:
            writer.add_tensor(own, values)
        else:
            writer.add_tensor(own, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for index, layer in enumerate(sorted(folder.glob("*_Dense")), 2):
        values = load_file(layer / "model.safetensors")["linear.weight"].numpy()
        writer.add_dense_features_dims(f"dense_{index}", values.shape[1], values.shape[0])
        packed = values if kind == Kind.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(f"dense_{index}.weight", packed, raw_dtype=kind)
    return _written(writer, file)


def _add_gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])


def _add_wordpiece(writer: gguf.GGUFWriter, folder: Path, count: int) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [str(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]
    tokens += [f"[unused{index}]" for index in range(count - len(tokens))]
    special = set(tokenizer.get_added_tokens_decoder())
    writer.add_tokenizer_model("bert")
    writer.add_token_list([_phantom(token) for token in tokens])
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    for name in ("sep", "unk", "pad", "mask"):
        getattr(writer, f"add_{name}_token_id")(tokens.index(f"[{name.upper()}]"))
    writer.add_bos_token_id(tokens.index("[CLS]"))  # cls_token_id in older files


def _phantom(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def unigram_values(model: Path) -> dict[str, Any]:
    """Return the metadata of XLM-RoBERTa's tokenizer, from sentencepiece's file: its pieces stand
    one place further on, behind special tokens of fairseq."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    count = pieces.get_piece_size()
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(i) for i in range(3, count))]
    scores = [0.0] * 4 + [pieces.get_score(i) for i in range(3, count)]
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.read_bytes())
    ids = {"bos": 0, "padding": 1, "eos": 2, "unknown": 3, "seperator": 2, "cls": 0, "mask": count}
    values = {
        "model": "t5",
        "pre": "default",
        "tokens": [*tokens, "<mask>"],
        "scores": [*scores, 0.0],
        "token_type": [3, 3, 3, 2, *([1] * (count - 3)), 3],
        "precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap),
        **{f"{name}_token_id": id for name, id in ids.items()},
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def _written(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
