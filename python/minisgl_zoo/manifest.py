"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

_FAMILIES: Final = {
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
    "Lfm2": "lfm2", "Lfm2Moe": "lfm2_moe", "Lfm3": "lfm3", "Mellum": "mellum", "MiMo": "mimo",
    "MiniMaxM2": "minimax_m2", "Ministral": "ministral", "Ministral3": "ministral3",
    "Mistral4": "mistral4", "MuseGlimmer": "muse_glimmer", "NemotronH": "nemotron_h",
    "Olmo2": "olmo2", "Olmo3": "olmo3", "Olmoe": "olmoe", "Phi3": "phi3", "Qwen3Next": "qwen3_next",
    "Qwen3VLMoeText": "qwen3_vl_moe", "Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe",
    "SeedOss": "seed_oss", "SmolLM3": "smollm3", "SolarOpen": "solar_open", "Youtu": "youtu",
}  # fmt: skip
"""The architecture without "ForCausalLM" -> the module of its `FAMILY`."""
_SPELLINGS: Final = {
    "Ernie4_5": ("Ernie4_5_ForCausalLM",),
    "ExaoneMoe": ("ExaoneMoEForCausalLM",),
    "Lfm2": ("LFM2ForCausalLM",),
}
"""Other spellings of an architecture, which some released files have."""

_CHAT_FORMATS: Final = (
    "seed", "qwen3_coder", "glm", "minimax", "hermes", "deepseek_v3", "deepseek_v31", "mistral",
    "mistral_v3", "gemma", "gemma4", "cohere", "phi4", "nemotron", "hunyuan", "lfm2", "olmo3",
    "granite", "llama3", "harmony", "muse_glimmer",
)  # fmt: skip
"""If a template has the texts of several formats, the first one counts."""

_WEIGHT_FORMATS: Final = {
    "compressed-tensors": "compressed_tensors:COMPRESSED_TENSORS",
    "fp8": "methods:FP8",
    "fbgemm_fp8": "methods:FBGEMM_FP8",
    "mxfp4": "methods:MXFP4_EXPERTS",
    "modelopt": "methods:MODELOPT",
    "awq": "methods:AWQ",
    "gptq": "methods:GPTQ",
    "auto-round": "methods:AUTO_ROUND",
}
"""The `quant_method` -> the module and name of what reads it."""

ROWS: Final = [
    *(
        Row("weight_formats", name, f"minisgl_zoo.weights.{method}")
        for name, method in _WEIGHT_FORMATS.items()
    ),
    Row(
        "weight_formats",
        "online",
        "minisgl_zoo.weights.online_formats:online_formats",
        when={"made": "while loading"},
    ),
    Row("wrappers", "text", "minisgl_zoo.wrapper:text_values"),
    Row("wrappers", "view", "minisgl_zoo.view:open_view"),
    Row("gguf", "folder", "minisgl_zoo.gguf.folder:gguf_folder"),
    Row("gguf", "named", "minisgl_zoo.gguf.hub:named_checkpoint"),
    Row("gguf", "usual", "minisgl_zoo.gguf.hub:usual_checkpoint"),
    Row("gguf", "checkpoint", "minisgl_zoo.gguf.checkpoint:GgufCheckpoint"),
    Row("gguf", "formats", "minisgl_zoo.gguf.formats:gguf_formats"),
    Row("gguf", "has_mxfp4", "minisgl_zoo.gguf.formats:has_mxfp4"),
    Row("kv_formats", "pool", "minisgl_zoo.kv8.pool:quantised_layer"),
    Row("kv_formats", "scales", "minisgl_zoo.kv8.scales:load_kv_scales"),
    *(
        Row("chat_formats", name, f"minisgl_zoo.calls.formats:{name.upper()}")
        for name in _CHAT_FORMATS
    ),
    Row("answers", "chat", "minisgl_zoo.calls.plan:encode_chat"),
    Row("answers", "split", "minisgl_zoo.calls.split:split_output"),
    Row("answers", "tools", "minisgl_zoo.calls.tools:prompt_fields"),
    Row("answers", "abilities", "minisgl_zoo.calls.known:abilities"),
    Row("logit_options", "create", "minisgl_zoo.logit_options:LogitOptions"),
    Row("grammars", "compile", "minisgl_zoo.grammar.compile:compiled"),
    Row("grammars", "maskers", "minisgl_zoo.grammar.maskers:Grammars"),
    Row("tokenizers", "convert", "minisgl_zoo.convert:convert"),
    Row("tokenizers", "stream", "minisgl_zoo.library_stream:library_streams"),
    Row("tokenizers", "recommended", "minisgl_zoo.recommended:recommended"),
    *(
        Row(
            "families",
            f"{name}ForCausalLM",
            f"minisgl_zoo.families.{module}:FAMILY",
            _SPELLINGS.get(name, ()),
        )
        for name, module in _FAMILIES.items()
    ),
]
