"""The weights of a GGUF file under the names of a Hugging Face checkpoint.

Experts are one stack for each of gate, up and down in the file. `minisgl.models.gguf_changes` has
what else differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl.models.gguf_changes import change_of
from minisgl.models.gguf_tensors import Blocks, Dequantised, Stack, mx_blocks, mx_scales
from minisgl.models.weight import Checkpoint
from minisgl.quantization.gguf import BLOCKS
from minisgl.quantization.gguf_blocks import LAYOUTS
from minisgl.utils.gguf import WEIGHTS, open_gguf
from minisgl.utils.gguf_config import ROPE_FREQS, is_mxfp4

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.gguf_tensors import Change

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
QWEN35: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
OF_ARCHITECTURE: Final[dict[str, dict[str, str]]] = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "qwen35": QWEN35,
    "qwen35moe": QWEN35,
}
"""What differs from `OF_LAYER`."""
WHOLE: Final = {
    "attn_sinks.weight": "self_attn.sinks",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
"""Tensors of a layer with another last part of the name."""
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
        predicting = reader.fields.get(f"{arch}.nextn_predict_layers")
        count = predicting.contents() if predicting else 0
        unread = {f"model.layers.{config.num_layers + index}." for index in range(count)}
        self._file_of = {}
        experts: dict[str, dict[str, Any]] = {}
        for tensor in reader.tensors:
            layer, part = _place(tensor.name)
            kind = part.partition(".")[0]
            name = matrix_name(arch, tensor.name)
            if tensor.name == ROPE_FREQS or layer in unread:
                continue  # in config.json; of a layer that predicts several tokens
            if kind in OF_EXPERTS and arch in STACKED:
                experts.setdefault(f"{layer}mlp.experts.", {})[part] = tensor
            elif kind in OF_EXPERTS:
                for index, data in enumerate(tensor.data):
                    of_expert = name.replace(".experts.", f".experts.{index}.")
                    self._add(of_expert, data, tensor.tensor_type)
            else:
                change = change_of(arch, kind, config)
                self._add(name, tensor.data, tensor.tensor_type, change)
        for prefix, tensors in experts.items():
            self._file_of |= {prefix + name: stack for name, stack in _stacks(tensors).items()}
        self.names = set(self._file_of)

    def _add(self, name: str, data: Any, kind: Any, change: Change | None = None) -> None:
        self._file_of[name] = Dequantised(data, kind, change)
        if kind.name in LAYOUTS:
            self._file_of[name + BLOCKS] = Blocks(data, change)


def matrix_name(arch: str, name: str) -> str:
    """The checkpoint's name of a file's tensor; of a stack of experts, without their number."""
    layer, part = _place(name)
    kind, _, suffix = part.partition(".")
    if kind in OF_EXPERTS:
        return f"{layer}mlp.experts.{OF_EXPERTS[kind]}.{suffix}"
    of_layer = {**OF_LAYER, **OF_ARCHITECTURE.get(arch, {})}
    return layer + WHOLE.get(part, f"{(of_layer if layer else GLOBAL).get(kind, kind)}.{suffix}")


def _place(name: str) -> tuple[str, str]:
    """blk.3.attn_q.weight -> ("model.layers.3.", "attn_q.weight"); others -> ("", name)."""
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk":
        return f"model.layers.{parts[1]}.", parts[2]
    return "", name


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
