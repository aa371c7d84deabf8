"""The weights of a GGUF file under the names of a Hugging Face checkpoint, dequantised when read.

A share of rows is dequantised alone; a share of columns needs whole rows. Files of the architecture
"llama" have the rows of q and k in the order of interleaved pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.models.interleaved import deinterleave
from minisgl.models.weight import Checkpoint
from minisgl.utils.gguf import ROPE_FREQS, WEIGHTS, open_gguf

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig

GLOBAL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
OF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
OF_EXPERTS: Final = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""[E, O, I] in the file, a tensor for each expert here."""


class GgufCheckpoint(Checkpoint):
    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises CheckpointError and ConfigError as `open_gguf`."""
        self.folder = folder
        reader = open_gguf(folder / WEIGHTS)
        is_llama = reader.fields["general.architecture"].contents() == "llama"
        self._file_of = {}
        for tensor in reader.tensors:
            if tensor.name == ROPE_FREQS:
                continue  # in config.json
            names = _declared(tensor.name, tensor.data)
            for index, name in enumerate(names):
                data = tensor.data[index] if len(names) > 1 else tensor.data
                head_dim = None
                if is_llama and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
                    head_dim = config.head_dim
                self._file_of[name] = _Tensor(data, tensor.tensor_type, head_dim)
        self.names = set(self._file_of)


def _declared(name: str, data: Any) -> list[str]:
    """The names in a Hugging Face checkpoint, several for experts; unknown ones stay."""
    stem, _, suffix = name.rpartition(".")
    if stem in GLOBAL:
        return [f"{GLOBAL[stem]}.{suffix}"]
    parts = stem.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk":
        layer = f"model.layers.{parts[1]}"
        if parts[2] in OF_LAYER:
            return [f"{layer}.{OF_LAYER[parts[2]]}.{suffix}"]
        if parts[2] in OF_EXPERTS:
            kind = OF_EXPERTS[parts[2]]
            return [f"{layer}.mlp.experts.{i}.{kind}.{suffix}" for i in range(len(data))]
    return [name]


class _Tensor:
    """One tensor, as a file and as a slice of safetensors have it; dequantised when indexed."""

    def __init__(self, data: Any, kind: Any, head_dim: int | None) -> None:
        """data: memory-mapped; rows of blocks where it is quantised. head_dim: of heads whose rows
        are interleaved pairs."""
        from gguf import quants

        self._data, self._kind, self._head_dim = data, kind, head_dim
        self._dequantise = quants.dequantize
        self._columns = self._dequantise(data[:1], kind).shape[1] if data.ndim > 1 else 0

    def get_slice(self, name: str) -> _Tensor:
        return self

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        if self._data.ndim > 1:
            return [self._data.shape[0], self._columns]
        return [int(self._dequantise(self._data, self._kind).shape[0])]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """index: a slice for each axis."""
        if self._head_dim:
            values = deinterleave(
                self._values(self._data), head_dim=self._head_dim, rotary_dim=self._head_dim
            )
            return values[index]
        return self._values(self._data[index[0]])[(slice(None), *index[1:])]

    def _values(self, data: Any) -> Tensor:
        values = np.ascontiguousarray(self._dequantise(data, self._kind), dtype=np.float32)
        return torch.from_numpy(values if values.flags.writeable else values.copy())
