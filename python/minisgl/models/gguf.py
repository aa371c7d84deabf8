"""The weights of a GGUF file under the names that our layers declare.

Experts are one stack for each of gate, up and down in the file. `minisgl.models.gguf_changes` has
what else differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.models.gguf_changes import change_of, parts_of
from minisgl.models.gguf_names import GLOBAL, OF_EXPERTS, STACKED, names_of
from minisgl.models.gguf_tensors import Dequantised, Stack, mx_blocks, mx_scales
from minisgl.models.weight import Checkpoint
from minisgl.utils.gguf import open_weights
from minisgl.utils.gguf_values import is_mxfp4

if TYPE_CHECKING:
    from minisgl.layers.moe import ExpertNames
    from minisgl.models.config import ModelConfig


class GgufCheckpoint(Checkpoint):
    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises ConfigError and CheckpointError as `open_weights`."""
        self.folder, self._config = folder, config
        fields, tensors = open_weights(folder)
        self._arch = arch = fields["general.architecture"].contents()
        self._of_layer, self._routed = names_of(arch), _routed(config)
        predicting = fields.get(f"{arch}.nextn_predict_layers")
        count = predicting.contents() if predicting else 0
        unread = {f"model.layers.{config.num_layers + index}." for index in range(count)}
        self._file_of = {}
        stacks: dict[str, dict[str, Any]] = {}
        for tensor in tensors:
            layer, part = _place(tensor.name)
            if tensor.name.startswith("rope_") or layer in unread:
                continue  # in config.json; of a layer that predicts several tokens
            if part.partition(".")[0] in OF_EXPERTS and arch in STACKED:
                stacks.setdefault(f"{layer}mlp.experts.", {})[part] = tensor
            else:
                self._file_of |= self._named(layer, part, tensor)
        for prefix, parts in stacks.items():
            self._file_of |= {prefix + name: stack for name, stack in _stacks(parts).items()}
        self.names = set(self._file_of)

    def _named(self, layer: str, part: str, tensor: Any) -> Iterator[tuple[str, Dequantised]]:
        """The tensors that one of the file is."""
        kind, _, suffix = part.rpartition(".") if "." in part else (part, "", "weight")
        names = self._routed.get(layer)
        if whole := self._of_layer.get(part):
            data = Dequantised(
                tensor.data, tensor.tensor_type, change_of(self._arch, kind, self._config)
            )
            yield layer + whole, data
        elif names and kind in OF_EXPERTS:
            pattern: str = getattr(names, OF_EXPERTS[kind])
            for index, data in enumerate(tensor.data):
                yield pattern.format(index), Dequantised(data, tensor.tensor_type)
        elif names and kind == "ffn_gate_up_exps":
            yield names.all_gate_up, Dequantised(tensor.data, tensor.tensor_type)
        else:
            known = self._of_layer if layer else GLOBAL
            if names:
                router = names.router.removeprefix(layer).removesuffix(".weight")
                known = {**known, "ffn_gate_inp": router, "exp_probs_b": router}
                suffix = "e_score_correction_bias" if kind == "exp_probs_b" else suffix
            for own, rows in parts_of(self._arch, kind, len(tensor.data), self._config):
                change = change_of(self._arch, own, self._config)
                data = Dequantised(tensor.data[rows], tensor.tensor_type, change)
                yield f"{layer}{known.get(own, own)}.{suffix}", data


def _routed(config: ModelConfig) -> dict[str, ExpertNames]:
    """The names of each layer's router and experts, by the layer's prefix."""
    moe = config.family.spec(config).moe
    if moe is None:
        return {}
    found = [moe.names(index) for index, sparse in enumerate(moe.is_sparse) if sparse]
    return {".".join(names.router.split(".", 3)[:3]) + ".": names for names in found}


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
