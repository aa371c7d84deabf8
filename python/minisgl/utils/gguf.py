"""A GGUF file of llama.cpp, seen as a checkpoint folder: config.json and the tokenizer's files.

They are made from the file's metadata, once for each file, below the cache folder. The folder has a
link to the file, from which `minisgl.models.gguf` reads the weights. Needs the package gguf. The
keys are those of llama.cpp's specification (docs/gguf.md there).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from minisgl import env
from minisgl.errors import CheckpointError, ConfigError
from minisgl.utils.gguf_check import check_header
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

WEIGHTS: Final = "model.gguf"
"""The link's name."""
ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
ROPE_FREQS: Final = "rope_freqs.weight"
"""Factors of each frequency: Llama 3.1's stretched rotations, which no key describes."""
LLAMA3: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of all models of Meta that have such factors."""
VERSION: Final = 1
"""Of what is written into a folder; raise it with every change."""


def gguf_folder(path: Path) -> Path:
    """Returns the folder for a GGUF file. Raises ConfigError where the package gguf is missing or
    the file's model is not supported, CheckpointError where the file is damaged."""
    path = path.resolve()
    stat = path.stat()
    key = repr((VERSION, str(path), stat.st_size, stat.st_mtime_ns)).encode()
    folder = env.cache_dir() / "gguf" / f"{path.stem}-{hashlib.sha256(key).hexdigest()[:12]}"
    if (folder / "config.json").is_file():
        return folder
    reader = open_gguf(path)
    try:
        from minisgl.utils.gguf_tokenizer import tokenizer_files

        values = {name: field.contents() for name, field in reader.fields.items()}
        files = {"config.json": json.dumps(_config(reader, values, path), indent=1)}
        files |= tokenizer_files(values, path)
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} lacks metadata of a language model, or has it in an unknown form: {error!r}"
        ) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    for name, text in files.items():
        (made / name).write_text(text, encoding="utf-8")
    (made / WEIGHTS).symlink_to(path)
    try:
        made.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    logger.info("%s: its config and tokenizer are in %s", path.name, folder)
    return folder


def open_gguf(path: Path) -> Any:
    """A gguf.GGUFReader, memory-mapped. Raises as `gguf_folder`."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(
            f'{path}: GGUF files need the package gguf: pip install "minisgl[gguf]"'
        ) from None
    try:
        check_header(path)
        return GGUFReader(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete ({error}); download it again"
        ) from error


def _config(reader: Any, values: dict[str, Any], path: Path) -> dict[str, Any]:
    """config.json as Hugging Face has it."""
    arch = values["general.architecture"]
    if arch not in ARCHITECTURES or (values.get(f"{arch}.expert_count", 0) and arch == "llama"):
        raise ConfigError(
            f"{path}: GGUF files of the architecture {arch!r} are not read; supported are "
            f"{', '.join(ARCHITECTURES)} (llama without experts). Others: the checkpoint that the "
            "file was made from, whose weights are *.safetensors"
        )
    if values.get("split.count", 1) > 1:
        raise ConfigError(
            f"{path} is one of {values['split.count']} parts: merge them with llama.cpp's "
            "llama-gguf-split --merge"
        )

    def get(key: str, *default: Any) -> Any:
        return values.get(f"{arch}.{key}", *default) if default else values[f"{arch}.{key}"]

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, hidden = get("attention.head_count"), get("embedding_length")
    stops = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in tensors,
        "torch_dtype": "bfloat16",
        "eos_token_id": sorted({stop for stop in stops if stop is not None}),
    }
    if scaling := _rope_scaling(values, tensors, arch, path):
        config["rope_scaling"] = scaling
    if arch == "qwen3moe":
        config |= {
            "num_experts": get("expert_count"),
            "num_experts_per_tok": get("expert_used_count"),
            "moe_intermediate_size": get("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return config


def _rope_scaling(
    values: dict[str, Any], tensors: dict[str, Any], arch: str, path: Path
) -> dict[str, Any] | None:
    if ROPE_FREQS in tensors:
        return {**LLAMA3, "factor": float(tensors[ROPE_FREQS].data.max())}
    kind = values.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{path}: rope.scaling.type is {kind!r}, expected none, linear or yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": values[f"{arch}.rope.scaling.factor"]}
    if kind == "yarn":
        original = values[f"{arch}.rope.scaling.original_context_length"]
        scaling["original_max_position_embeddings"] = original
    return scaling
