"""The family of each architecture. A family is imported when it is used."""

from __future__ import annotations

from importlib import import_module

from minisgl.models.spec import Family

_SUFFIX = "ForCausalLM"
_MODULES = {
    "Afmoe": "afmoe", "BailingMoeV2": "bailing_moe_v2", "Cohere": "cohere", "Cohere2": "cohere2",
    "Cohere2Moe": "cohere2_moe", "Cwm": "cwm", "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3", "Dots1": "dots1", "Ernie4_5": "ernie4_5",
    "Ernie4_5_Moe": "ernie4_5_moe", "Exaone4": "exaone4", "ExaoneMoe": "exaone_moe",
    "FalconH1": "falcon_h1", "Gemma": "gemma", "Gemma2": "gemma2", "Gemma3": "gemma3",
    "Gemma4": "gemma4", "Gemma4Unified": "gemma4_unified", "Glm": "glm", "Glm4": "glm4",
    "Glm4Moe": "glm4_moe", "Glm4MoeLite": "glm4_moe_lite", "GptOss": "gpt_oss",
    "Granite": "granite", "GraniteMoe": "granite_moe", "GraniteMoeHybrid": "granite_moe_hybrid",
    "GraniteMoeSWA": "granite_moe_swa", "GraniteSWA": "granite_swa", "HYV3": "hy_v3",
    "HunYuanDenseV1": "hunyuan", "HunYuanMoEV1": "hunyuan_moe", "InternLM3": "internlm3",
    "Lfm2": "lfm2", "Lfm2Moe": "lfm2_moe", "Lfm3": "lfm3", "Llama": "llama", "Mellum": "mellum",
    "MiMo": "mimo", "MiniMaxM2": "minimax_m2", "Ministral": "ministral", "Ministral3": "ministral3",
    "Mistral": "mistral", "Mistral4": "mistral4", "Mixtral": "mixtral",
    "MuseGlimmer": "muse_glimmer", "NemotronH": "nemotron_h", "Olmo2": "olmo2", "Olmo3": "olmo3",
    "Olmoe": "olmoe", "Phi3": "phi3", "Qwen2": "qwen2", "Qwen2Moe": "qwen2_moe", "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe", "Qwen3Next": "qwen3_next", "Qwen3VLMoeText": "qwen3_vl_moe",
    "Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe", "SeedOss": "seed_oss", "SmolLM3": "smollm3",
    "SolarOpen": "solar_open", "Youtu": "youtu",
}  # fmt: skip
"""architecture without `_SUFFIX` -> the module that has its `FAMILY`."""
_OF_THE_CORE = frozenset({
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
})  # fmt: skip
_SPELLINGS = {
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "LFM2ForCausalLM": "Lfm2ForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
}
"""An architecture as some released files spell it -> as Hugging Face does."""


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(name + _SUFFIX for name in _MODULES))


def module_of(architecture: str) -> str:
    module = _MODULES[architecture.removesuffix(_SUFFIX)]
    package = "minisgl.models" if module in _OF_THE_CORE else "minisgl_zoo.families"
    return f"{package}.{module}"


def get_model_class(architecture: str) -> Family:
    """Return the family that builds `architecture`. Raises UnsupportedModel with the names of all
    architectures."""
    architecture = _SPELLINGS.get(architecture, architecture)
    if architecture not in supported_architectures():
        from minisgl.models.wrapper import unsupported

        raise unsupported(architecture)
    family: Family = import_module(module_of(architecture)).FAMILY
    return family
