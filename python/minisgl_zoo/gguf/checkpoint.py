"""The weights of a GGUF file, under the names that our layers declare.

In the file, the experts of a layer are three stacks: gate, up and down; W_k and W_v of latents are
two tensors. Other differences are in
`minisgl_zoo.gguf.changes`.
"""

from __future__ import annotations

from pathlib import Path

from minisgl.models.config import ModelConfig
from minisgl.models.loading.weight import Checkpoint
from minisgl_zoo.gguf.blocks import FORMS
from minisgl_zoo.gguf.header import MappedTensor
from minisgl_zoo.gguf.index import open_weights
from minisgl_zoo.gguf.names import ENCODERS, EXPERT_KINDS, LATENT_HEADS, STACKED, Places, split_name
from minisgl_zoo.gguf.tensors import Blocks, Dequantised, LatentHeads, MxBytes, Stack
from minisgl_zoo.gguf.tile_weight import BLOCKS


class GgufCheckpoint(Checkpoint):
    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises the errors of `open_weights`."""
        self.folder = folder
        values, tensors = open_weights(folder)
        arch = values["general.architecture"]
        places = Places(arch, config)
        count = values.get(f"{arch}.nextn_predict_layers", 0)
        unread = {f"model.layers.{config.num_layers + index}." for index in range(count)}
        # config.json has the first; a decoder's reranking rows are in its LM head, too; pooling
        # reads the third (minisgl_zoo.pooling.dense); multi-token prediction is not served
        skipped = ("rope_",) if arch in ENCODERS else ("rope_", "cls.", "dense_")
        self.files = {}
        stacks: dict[str, dict[str, MappedTensor]] = {}
        heads: dict[str, dict[str, Dequantised]] = {}
        for tensor in tensors:
            layer, part = split_name(tensor.name)
            if tensor.name.startswith(skipped) or layer in unread:
                continue
            if part in LATENT_HEADS:
                made = Dequantised(tensor.data, tensor.kind)
                heads.setdefault(f"{layer}self_attn.kv_b_proj.weight", {})[part] = made
            elif part.partition(".")[0] in EXPERT_KINDS and arch in STACKED:
                stacks.setdefault(f"{layer}mlp.experts.", {})[part] = tensor
            else:
                for place in places.of(tensor.name, tensor.data.shape):
                    data, kind = tensor.data[place.index], tensor.kind
                    self.files[place.name] = Dequantised(data, kind, place.change)
                    if kind in FORMS:
                        self.files[place.name + BLOCKS] = Blocks(data, place.change)
        for name, each in heads.items():
            self.files[name] = LatentHeads(*(each[part] for part in LATENT_HEADS))
        for prefix, parts in stacks.items():
            self.files |= {prefix + name: stack for name, stack in _stacks(parts).items()}
        self.names = set(self.files)


def _stacks(tensors: dict[str, MappedTensor]) -> dict[str, Stack]:
    """Return the stacks of a layer's experts as gpt-oss's checkpoint has them, by name: the rows of
    gate then up, and those of down."""
    stacks = {}
    for name, kinds in (
        ("gate_up_proj", ("ffn_gate_exps", "ffn_up_exps")),
        ("down_proj", ("ffn_down_exps",)),
    ):
        parts = [tensors[f"{kind}.weight"] for kind in kinds]
        if all(part.kind == "MXFP4" for part in parts):
            for end, is_scale in (("blocks", False), ("scales", True)):
                read = [MxBytes(part.data, is_scale=is_scale) for part in parts]
                stacks[f"{name}_{end}"] = Stack(read)
        else:
            stacks[name] = Stack([Dequantised(part.data, part.kind) for part in parts])
        biases = [tensors[f"{kind}.bias"] for kind in kinds]
        stacks[f"{name}_bias"] = Stack([Dequantised(b.data, b.kind) for b in biases])
    return stacks
