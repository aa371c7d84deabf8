"""The text model inside a model of text and images: how its config and its tensors are found."""

from __future__ import annotations

from typing import Any

from minisgl import plugins
from minisgl.errors import UnsupportedModel

TEXT_MODELS = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "muse_glimmer_text": "MuseGlimmerForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""`model_type` of a text_config -> its architecture."""
WRAPPERS = {
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Gemma4ForConditionalGeneration": ("gemma4_text",),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified_text",),
    "KimiK25ForConditionalGeneration": ("kimi_k2", "deepseek_v3"),
    "Kimi_K25ForConditionalGeneration": ("deepseek_v3", "kimi_k2"),
    "Lfm2VlForConditionalGeneration": ("lfm2", "lfm2_moe"),
    "Lfm3VlForConditionalGeneration": ("lfm3",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3", "mistral4"),
    "MuseGlimmerForConditionalGeneration": ("muse_glimmer_text",),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", "qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text", "qwen2_5_vl"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text",),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text",),
}
"""Architecture -> the text models that it is known to have."""

_COMMON_FIELDS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields that may be beside text_config. They replace those inside it, as in Hugging Face."""
OTHER_PARTS = (
    *("vision_tower", "multi_modal_projector", "visual", "mtp"),
    *("audio_tower", "embed_vision", "embed_audio", "vision_embedder"),
    *("vision_adapter", "vision_projection", "mm_projector"),
)
"""Modules beside the text model. Their tensors are not read, unless `model_name` keeps them."""


def text_values(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the text model's config.json. Raises UnsupportedModel if it is not served.

    Qwen2-VL and Qwen2.5-VL were released without a text_config: its fields are beside
    vision_config.
    """
    inner = values.get("text_config")
    text: dict[str, Any] = inner if isinstance(inner, dict) else values
    architectures = values.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if plugins.row_of("families", name):
        return values
    model_type = text.get("model_type", WRAPPERS.get(name, ("",))[0])
    if name not in WRAPPERS or model_type not in WRAPPERS[name]:
        raise UnsupportedModel(
            f"{where}: no model family here builds {name!r} around a text model of type "
            f"{model_type!r}; served around a text model are {', '.join(WRAPPERS)}"
        )
    shared = {field: values[field] for field in _COMMON_FIELDS if values.get(field) is not None}
    return {**text, **shared, "architectures": [TEXT_MODELS[model_type]]}


def text_name(name: str) -> str | None:
    """Return a tensor's name in the text model; None for a tensor of `OTHER_PARTS`.

    transformers 5 writes `model.language_model.layers`, older files have
    `language_model.model.layers`.
    """
    if part_of(name) in OTHER_PARTS:
        return None
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def model_name(name: str) -> str | None:
    """Return `text_name`, and the name of a tensor of multi-token prediction."""
    return name if name.startswith("mtp.") else text_name(name)


def part_of(name: str) -> str:
    """Return the name of the large model's module that has a tensor."""
    return name.removeprefix("model.").split(".")[0]
