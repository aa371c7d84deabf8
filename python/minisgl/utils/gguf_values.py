"""The metadata and the tensors of a GGUF file, by the keys of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl.errors import ConfigError

ROPE_FREQS: Final = "rope_freqs.weight"
"""Factors of each frequency: Llama 3.1's stretched rotations, which no key describes."""
LLAMA3: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of all models of Meta and LG that have such factors."""
YARN: Final = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
"""A field of config.json -> the key."""


@dataclass(frozen=True, slots=True)
class GgufValues:
    values: Mapping[str, Any]
    tensors: Mapping[str, Any]
    path: Path

    @property
    def arch(self) -> str:
        return str(self.values["general.architecture"])

    @property
    def num_layers(self) -> int:
        """Without those that predict several tokens, which come last and are not read."""
        return int(self.get("block_count") - self.get("nextn_predict_layers", 0))

    def get(self, key: str, *default: Any) -> Any:
        """Of the architecture. Raises KeyError where it is absent and there is no default."""
        name = f"{self.arch}.{key}"
        return self.values.get(name, *default) if default else self.values[name]

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def rope_scaling(self) -> dict[str, Any] | None:
        """As config.json has it. Raises ConfigError for a type that is not known."""
        if ROPE_FREQS in self.tensors:
            return {**LLAMA3, "factor": float(self.tensors[ROPE_FREQS].data.max())}
        kind = self.get("rope.scaling.type", "none")
        if kind in ("none", "longrope"):  # the factors of the latter are tensors
            return None
        if kind not in ("linear", "yarn"):
            raise ConfigError(
                f"{self.path}: rope.scaling.type is {kind!r}, expected none, linear, yarn or "
                "longrope"
            )
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self.get("rope.scaling.factor")}
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
    """Returns the value of each layer, where the file has one for all, or a list."""
    value = file.get(key)
    return value[: file.num_layers] if isinstance(value, list) else [value] * file.num_layers


def layer_types(file: GgufValues, period: int = 4) -> list[str]:
    """Returns for each layer whether it has a window; without a list, each but every `period`-th
    has one."""
    pattern = file.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        pattern = [(index + 1) % pattern != 0 for index in range(file.num_layers)]
    types = ["sliding_attention" if has else "full_attention" for has in pattern]
    return types[: file.num_layers]


def experts(file: GgufValues) -> dict[str, Any]:
    return {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def shared(file: GgufValues) -> dict[str, Any]:
    """The expert that every token takes."""
    return {"shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length")}


def is_mxfp4(tensor: Any) -> bool:
    return bool(tensor.tensor_type.name == "MXFP4")
