"""Makes Hugging Face's config.json from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minisgl.errors import ConfigError
from minisgl_zoo.gguf.families import FAMILIES
from minisgl_zoo.gguf.values import CONTROL, USE_ORIGINAL, USER_DEFINED, Fields, GgufValues

ENDS: Final = (
    *("<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>", "</s>", "<eos>"),
    *("[EOS]", "[EOT]", "[e~[", "<|observation|>"),
)
"""Tokens with these texts end an answer, as do the tokens that the metadata names. llama.cpp finds
them by their texts, too. The last one is GLM's, after a tool call."""
HARMONY: Final = {"<|return|>", "<|call|>"}
"""If a vocabulary has both, <|end|> ends a message but not the answer."""
SPECIAL: Final = (CONTROL, USER_DEFINED)
"""Only tokens of these types can end an answer."""


def config_of(values: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> Fields:
    """Return the contents of config.json.

    values: the metadata. tensors: the tensors of all parts, by name. Raises ConfigError if the
    model is not supported, KeyError if a key is missing.
    """
    file = GgufValues(values, tensors, path)
    arch = file.arch
    if arch not in FAMILIES:
        raise ConfigError(
            f"{path}: GGUF files of the architecture {arch!r} are not read; supported are "
            f"{', '.join(FAMILIES)}; for this one {USE_ORIGINAL}"
        )
    if arch == "glm4" and any(file.get("rope.dimension_sections", [])):
        raise ConfigError(
            f"{path}: this GLM reads images, too, and its file has the attention heads in another "
            f"order, which is not supported; {USE_ORIGINAL}"
        )
    heads, hidden = _most(file.get("attention.head_count")), file.get("embedding_length")
    head_dim = file.get("attention.key_length", hidden // heads)
    rotated = file.get("rope.dimension_count", head_dim)
    architecture, own = FAMILIES[arch]
    config: Fields = {
        "architectures": [architecture],
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": _most(
            file.get("feed_forward_length", file.get("expert_feed_forward_length", 0))
        ),
        "num_hidden_layers": file.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _most(file.get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "partial_rotary_factor": min(rotated / head_dim, 1.0),
        "rms_norm_eps": file.get(
            "attention.layer_norm_rms_epsilon", file.get("attention.layer_norm_epsilon", None)
        ),
        "rope_theta": file.get("rope.freq_base", 10000.0),
        "max_position_embeddings": file.get("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
        "eos_token_id": _ends(values),
    }
    if pooling := file.get("pooling_type", 0):
        config["pooling_type"] = pooling
    if scaling := file.rope_scaling():
        config["rope_scaling"] = scaling
    return config | own(file)


def _most(value: Any) -> int:
    """Return the value; if it is a list of one for each layer, the largest. Layers without the part
    have 0."""
    return int(max(value) if isinstance(value, list) else value)


def _ends(values: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    stops = {int(values[key]) for key in keys if key in values}
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    kinds = values.get("tokenizer.ggml.token_type", [])
    places = {token: i for i, token in enumerate(tokens) if i < len(kinds) and kinds[i] in SPECIAL}
    ends = set(ENDS) - ({"<|end|>"} if places.keys() >= HARMONY else set())
    return sorted(stops | {places[token] for token in ends & places.keys()})
