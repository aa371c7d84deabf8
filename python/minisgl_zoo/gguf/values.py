"""Reads the metadata of a GGUF file, whose keys begin with its architecture's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl.errors import ConfigError

Fields = dict[str, Any]
"""Fields of config.json."""
USE_ORIGINAL: Final = (
    "use the checkpoint that the file was made from, whose weights are *.safetensors"
)
"""Errors about a file that is not supported end with this advice."""
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""llama.cpp numbers the types of tokens so."""
ROPE_FREQS: Final = "rope_freqs.weight"
"""This tensor has a factor for each frequency: Llama 3.1's rope scaling, which no key describes."""
LLAMA3: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""These values are equal in all models of Meta and LG that have `ROPE_FREQS`."""
YARN: Final = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
"""Maps a field of config.json to the end of its key."""


@dataclass(frozen=True, slots=True)
class GgufValues:
    """values: the metadata. tensors: the tensors of all parts, by name. path: the file, for
    errors."""

    values: Mapping[str, Any]
    tensors: Mapping[str, Any]
    path: Path

    @property
    def arch(self) -> str:
        return str(self.values["general.architecture"])

    @property
    def num_layers(self) -> int:
        """The number of layers, without the last ones for multi-token prediction, which are not
        loaded."""
        return int(self.get("block_count") - self.get("nextn_predict_layers", 0))

    def get(self, key: str, *default: Any) -> Any:
        """Return the value of a key of the architecture. Raises KeyError if it is absent, unless
        there is a default."""
        name = f"{self.arch}.{key}"
        return self.values.get(name, *default) if default else self.values[name]

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def rope_scaling(self) -> Fields | None:
        """Return config.json's `rope_scaling`, or None. Raises ConfigError for an unknown type."""
        if ROPE_FREQS in self.tensors:
            return {**LLAMA3, "factor": float(self.tensors[ROPE_FREQS].data.max())}
        kind = self.get("rope.scaling.type", "none")
        if kind in ("none", "longrope"):  # `families` reads the factors of longrope
            return None
        if kind not in ("linear", "yarn"):
            raise ConfigError(
                f"{self.path}: rope.scaling.type is {kind!r}, expected none, linear, yarn or "
                "longrope"
            )
        scaling: Fields = {"rope_type": kind, "factor": self.get("rope.scaling.factor")}
        if kind == "yarn":
            original = self.get("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
            named = {field: self.get(f"rope.scaling.{key}", None) for field, key in YARN.items()}
            scaling |= {field: value for field, value in named.items() if value is not None}
            if over_all := self.get("rope.scaling.yarn_log_multiplier", 0.0):
                scaling |= {"mscale": 1.0, "mscale_all_dim": over_all}
            if self.arch == "gpt-oss":
                scaling["truncate"] = False
        return scaling


def per_layer(file: GgufValues, key: str) -> list[Any]:
    """Return the value of each layer. The file has one value for all layers, or a list."""
    value = file.get(key)
    return value[: file.num_layers] if isinstance(value, list) else [value] * file.num_layers


def layer_types(file: GgufValues) -> list[str]:
    """Return config.json's `layer_types`.

    The file has a list, or a period p, by default 4: every p-th layer has no window.
    """
    pattern = file.get("attention.sliding_window_pattern", 4)
    if isinstance(pattern, int):
        pattern = [(index + 1) % pattern != 0 for index in range(file.num_layers)]
    types = ["sliding_attention" if has else "full_attention" for has in pattern]
    return types[: file.num_layers]


def experts(file: GgufValues) -> Fields:
    """Return the fields of a mixture of experts, by the names that most families have."""
    return {
        **expert_counts(file, "num_experts"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def expert_counts(file: GgufValues, field: str) -> Fields:
    """Return the number of experts and the number that each token uses. field: the family's name
    for the number of experts."""
    return {
        field: file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
    }


def grouped_experts(file: GgufValues, num_shared: int) -> Fields:
    """Return the fields of experts that are chosen within groups.

    num_shared: the number of experts that all tokens use, if no key says it.
    """
    return {
        **experts(file),
        "n_routed_experts": file.get("expert_count"),
        "n_shared_experts": file.get("expert_shared_count", num_shared),
        "n_group": file.get("expert_group_count", 1),
        "topk_group": file.get("expert_group_used_count", 1),
        "norm_topk_prob": file.get("expert_weights_norm", True),
        "routed_scaling_factor": file.get("expert_weights_scale", 1.0),
    }


def shared_expert(file: GgufValues) -> Fields:
    """Return the width of the expert that all tokens use."""
    return {"shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length")}
