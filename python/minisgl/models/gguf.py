"""The weights of a GGUF file under the names of a Hugging Face checkpoint.

Files of the architecture "llama" have the rows of q and k in the order of interleaved pairs, those
of Gemma have 1 + the weight of a norm, and experts are one stack for each of gate, up and down.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl.models.gguf_tensors import Dequantised, Stack, mx_blocks, mx_scales
from minisgl.models.weight import Checkpoint
from minisgl.utils.gguf import WEIGHTS, open_gguf
from minisgl.utils.gguf_config import ROPE_FREQS, is_mxfp4

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
SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OF_ARCHITECTURE: Final = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
}
"""What differs from `OF_LAYER`."""
PLUS_ONE: Final = ("gemma2", "gemma3")
"""Architectures whose files have 1 + the weight of each norm."""
OF_EXPERTS: Final = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""[E, O, I] in the file, a tensor for each expert here."""
STACKED: Final = ("gpt-oss",)
"""Architectures whose checkpoints have one tensor for all experts."""


class GgufCheckpoint(Checkpoint):
    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises ConfigError and CheckpointError as `open_gguf`."""
        self.folder = folder
        reader = open_gguf(folder / WEIGHTS)
        arch = reader.fields["general.architecture"].contents()
        self._file_of = {}
        self._of_layer = {**OF_LAYER, **OF_ARCHITECTURE.get(arch, {})}
        experts: dict[str, dict[str, Any]] = {}
        for tensor in reader.tensors:
            stem, _, suffix = tensor.name.rpartition(".")
            layer, kind = _place(stem)
            if tensor.name == ROPE_FREQS:
                continue  # in config.json
            if kind not in OF_EXPERTS:
                self._file_of[self._name(stem, suffix)] = Dequantised(
                    tensor.data,
                    tensor.tensor_type,
                    head_dim=config.head_dim
                    if arch == "llama" and kind in ("attn_q", "attn_k")
                    else None,
                    minus=1.0 if arch in PLUS_ONE and kind.endswith("norm") else 0.0,
                )
            elif arch in STACKED:
                experts.setdefault(f"{layer}.mlp.experts.", {})[f"{kind}.{suffix}"] = tensor
            else:
                for index, data in enumerate(tensor.data):
                    name = f"{layer}.mlp.experts.{index}.{OF_EXPERTS[kind]}.{suffix}"
                    self._file_of[name] = Dequantised(data, tensor.tensor_type)
        for prefix, tensors in experts.items():
            self._file_of |= {prefix + name: stack for name, stack in _stacks(tensors).items()}
        self.names = set(self._file_of)

    def _name(self, stem: str, suffix: str) -> str:
        """The name in a Hugging Face checkpoint; unknown ones stay."""
        if stem in GLOBAL:
            return f"{GLOBAL[stem]}.{suffix}"
        layer, kind = _place(stem)
        if kind not in self._of_layer:
            return f"{stem}.{suffix}"
        name = f"{layer}.{self._of_layer[kind]}"
        return name if kind == "attn_sinks" else f"{name}.{suffix}"


def _place(stem: str) -> tuple[str, str]:
    """blk.3.attn_q -> (model.layers.3, attn_q); output_norm -> ("", output_norm)."""
    parts = stem.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk":
        return f"model.layers.{parts[1]}", parts[2]
    return "", stem


def _stacks(tensors: dict[str, Any]) -> dict[str, Stack]:
    """The stacks of a layer's experts by their names: gate's rows, then up's; and down's."""
    stacks = {}
    for name, kinds in (
        ("gate_up_proj", ("ffn_gate_exps", "ffn_up_exps")),
        ("down_proj", ("ffn_down_exps",)),
    ):
        parts = [tensors[f"{kind}.weight"] for kind in kinds]
        if all(map(is_mxfp4, parts)):
            stacks[f"{name}_blocks"] = Stack([mx_blocks(part.data) for part in parts])
            stacks[f"{name}_scales"] = Stack([mx_scales(part.data) for part in parts])
        else:
            stacks[name] = Stack([Dequantised(part.data, part.tensor_type) for part in parts])
        biases = [tensors[f"{kind}.bias"] for kind in kinds]
        stacks[f"{name}_bias"] = Stack([Dequantised(b.data, b.tensor_type) for b in biases])
    return stacks
