"""Reads a model's description from its checkpoint, for the doors of other vendors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from minisgl.tokenizer.tokenizer import read_json_object
from minisgl.utils.hf import CARD, weight_files

_SHAPE: Final = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}
"""A field of config.json -> its key in Ollama's `model_info`, which is GGUF's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The description of a model.

    family: `model_type` of config.json, or the architecture of a GGUF file. num_parameters: 0
    without weight files. num_bytes: the size of the weight files. digest: SHA-256 of config.json
    and of the weight files' names and sizes.
    shape: the model's sizes under GGUF's names, without the family before them.
    """

    family: str
    num_parameters: int
    num_bytes: int
    dtype: str
    quantization: str
    digest: str
    format: Literal["safetensors", "gguf"] = "safetensors"
    shape: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> str:
        """The number of parameters, such as 4.9M or 7.6B."""
        for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
            if self.num_parameters >= factor:
                return f"{self.num_parameters / factor:.1f}{unit}"
        return str(self.num_parameters)


def read_card(folder: Path) -> ModelCard:
    """Return the card of the checkpoint in `folder`, which must be loadable."""
    config = read_json_object(folder / "config.json")
    gguf = read_json_object(folder / CARD)
    if gguf:
        files = sorted(folder.glob("*.gguf"))
    else:
        files = weight_files(folder) if any(folder.glob("model*.safetensors*")) else []
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    sizes = [file.stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{file.name} {size}".encode())
    text = config.get("text_config") or {}
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    dtype = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or ""
    fields = {**text, **config}
    return ModelCard(
        family=str(gguf.get("architecture") or config.get("model_type", "")),
        num_parameters=gguf.get("num_parameters") or sum(map(_num_parameters, files)),
        num_bytes=sum(sizes),
        dtype=str(dtype),
        quantization=str(gguf.get("file_type") or quantization.get("quant_method", "")),
        digest=digest.hexdigest(),
        format="gguf" if gguf else "safetensors",
        shape={key: fields[name] for name, key in _SHAPE.items() if type(fields.get(name)) is int},
    )


def _num_parameters(file: Path) -> int:
    """Return the number of elements in a safetensors file. Reads only its JSON header."""
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
