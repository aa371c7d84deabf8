"""The linear layers that an embedder may have behind its pooling (sentence-transformers' `Dense`).

Source: the files of EmbeddingGemma; the package gguf, for its tensors `dense_2` and `dense_3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from minisgl.core.req import FloatArray
from minisgl.errors import CheckpointError
from minisgl.utils.hf import read_json
from minisgl_zoo.gguf.index import open_weights
from minisgl_zoo.pooling.cross_encoder import IDENTITY, Activation, named_activation


@dataclass(frozen=True, slots=True)
class Dense:
    """[N, I] -> [N, O], float32."""

    weight_OI: FloatArray
    bias_O: FloatArray | float = 0.0
    activation: Activation = IDENTITY

    def __call__(self, x_NI: FloatArray) -> FloatArray:
        x_NO: FloatArray = self.activation(x_NI @ self.weight_OI.T + self.bias_O)
        return x_NO


def read_dense(folder: Path) -> Dense:
    """Return the layer of a module's folder. Raises CheckpointError."""
    config = read_json(folder / "config.json")
    activation = named_activation(folder, config.get("activation_function"))
    read: Any = deserialize  # has no types
    try:
        stored = dict(read((folder / "model.safetensors").read_bytes()))
        found = {name.removeprefix("linear."): _values(**x) for name, x in stored.items()}
        return Dense(found["weight"], found.get("bias", 0.0), activation)
    except (OSError, SafetensorError, LookupError) as error:
        raise CheckpointError(
            f"{folder}/model.safetensors must have linear.weight as F32, F16 or BF16: {error!r}"
        ) from error


def gguf_dense(folder: Path) -> tuple[Dense, ...]:
    """Return the layers in the GGUF file of a folder."""
    found = sorted((x.name, x) for x in open_weights(folder)[1] if x.name.startswith("dense_"))
    return tuple(Dense(_values(x.data, x.kind)) for _, x in found)


def _values(data: Any, dtype: str, shape: Any = None) -> FloatArray:
    """Return the numbers of a tensor. shape: of one of safetensors, whose data are bytes. Raises
    KeyError for an unknown type."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if shape:
        data = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)
    values: FloatArray = dequantize(data, GGMLQuantizationType[dtype])
    return values
