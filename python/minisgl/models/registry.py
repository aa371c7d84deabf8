"""The family of each architecture. A family is imported when it is used."""

from __future__ import annotations

from importlib import import_module

from minisgl.models.spec import Family

_MODULES = {
    "Cohere2ForCausalLM": "cohere2", "CohereForCausalLM": "cohere", "CwmForCausalLM": "cwm",
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3",
    "Ernie4_5ForCausalLM": "ernie4_5", "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4", "ExaoneMoeForCausalLM": "exaone_moe",
    "FalconH1ForCausalLM": "falcon_h1", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3", "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified", "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4", "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite", "GlmForCausalLM": "glm",
    "GptOssForCausalLM": "gpt_oss", "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe", "GraniteMoeHybridForCausalLM": "granite_moe_hybrid",
    "GraniteMoeSWAForCausalLM": "granite_moe_swa", "GraniteSWAForCausalLM": "granite_swa",
    "HYV3ForCausalLM": "hy_v3", "HunYuanDenseV1ForCausalLM": "hunyuan",
    "HunYuanMoEV1ForCausalLM": "hunyuan_moe", "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe", "Lfm3ForCausalLM": "lfm3", "LlamaForCausalLM": "llama",
    "MellumForCausalLM": "mellum", "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3", "MinistralForCausalLM": "ministral",
    "Mistral4ForCausalLM": "mistral4", "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral", "MuseGlimmerForCausalLM": "muse_glimmer",
    "NemotronHForCausalLM": "nemotron_h", "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe", "Phi3ForCausalLM": "phi3", "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe", "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLMoeTextForCausalLM": "qwen3_vl_moe", "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe", "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3", "SolarOpenForCausalLM": "solar_open",
}  # fmt: skip
"""architecture -> the module of this package that has its `FAMILY`."""


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_MODULES))


def module_of(architecture: str) -> str:
    return f"minisgl.models.{_MODULES[architecture]}"


def get_model_class(architecture: str) -> Family:
    """Return the family that builds `architecture`. Raises UnsupportedModel with the names of all
    architectures."""
    if architecture not in _MODULES:
        from minisgl.models.wrapper import unsupported

        raise unsupported(architecture)
    family: Family = import_module(module_of(architecture)).FAMILY
    return family
