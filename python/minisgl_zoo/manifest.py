"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

_FAMILIES: Final = {
    "cohere": ("Cohere", "Cohere2", "Cohere2Moe"),
    "exaone": ("Exaone4", "ExaoneMoe"),
    "falcon_h1": ("FalconH1",),
    "gemma": ("Gemma", "Gemma2", "Gemma3", "Gemma4", "Gemma4Unified"),
    "gpt_oss": ("GptOss",),
    "granite": ("Granite", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeSWA", "GraniteSWA"),
    "hunyuan": ("HunYuanDenseV1", "HunYuanMoEV1"),
    "latents": ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Mistral4", "Youtu"),
    "lfm": ("Lfm2", "Lfm2Moe", "Lfm3"),
    "muse_glimmer": ("MuseGlimmer",),
    "nemotron_h": ("NemotronH",),
    "plain": (
        "Cwm", "Ernie4_5", "Glm", "Glm4", "InternLM3", "MiMo", "Ministral", "Ministral3", "Olmo2",
        "Olmo3", "Olmoe", "Phi3", "SeedOss", "SmolLM3",
    ),
    "qwen": ("Mellum", "Qwen3Next", "Qwen3VLMoeText", "Qwen3_5", "Qwen3_5Moe"),
    "sigmoid_mixtures": (
        "Afmoe", "BailingMoeV2", "Dots1", "Ernie4_5_Moe", "Glm4Moe", "HYV3", "MiniMaxM2",
        "SolarOpen",
    ),
}  # fmt: skip
"""The module in `families` -> its architectures, without "ForCausalLM". Each is there under its
name in capitals; `docs/models.md` says what it is."""
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

_VISION: Final = {
    "Gemma3": "gemma:Gemma3",
    "Gemma4": "gemma:Gemma4",
    "Gemma4Unified": "gemma:Gemma4Unified",
    "Lfm2Vl": "lfm2:Lfm2Vl",
    "Mistral3": "mistral:Mistral3",
    "Qwen3VL": "qwen:Qwen3VL",
    "Qwen3VLMoe": "qwen:Qwen3VLMoe",
    "Qwen3_5": "qwen:Qwen35",
    "Qwen3_5Moe": "qwen:Qwen35Moe",
}
"""The architecture without "ForConditionalGeneration" -> its vision tower."""

_ENCODERS: Final = {
    "BertModel": "bert:BERT",
    "RobertaModel": "bert:ROBERTA",
    "XLMRobertaModel": "bert:ROBERTA",
    "MPNetModel": "bert:MPNET",
    "NomicBertModel": "bert:NOMIC",
    "ModernBertModel": "modernbert:MODERNBERT",
    "Gemma3TextModel": "gemma:GEMMA3",
    "BertForSequenceClassification": "bert:BERT",
    "RobertaForSequenceClassification": "bert:ROBERTA",
    "XLMRobertaForSequenceClassification": "bert:ROBERTA",
    "ModernBertForSequenceClassification": "modernbert:MODERNBERT",
}
"""The architecture -> the module in `families` that has it."""

ROWS: Final = [
    *(
        Row("weight_formats", name, f"minisgl_zoo.weights.{method}")
        for name, method in _WEIGHT_FORMATS.items()
    ),
    Row(
        "weight_formats",
        "any",
        "minisgl_zoo.weights.formats:read_formats",
        when={"of": "checkpoints"},  # no quant_method
    ),
    Row("moe", "panels", "minisgl_zoo.weights.panel_experts:create_backend", when={"ops": "cpu"}),
    Row("rotations", "longrope", "minisgl_zoo.rotations:longrope", ("su",)),  # su: its first name
    Row("rotations", "proportional", "minisgl_zoo.rotations:proportional"),
    Row("wrappers", "text", "minisgl_zoo.wrapper:text_values"),
    Row("wrappers", "view", "minisgl_zoo.view:open_view"),
    Row("hubs", "modelscope", "minisgl_zoo.modelscope:download"),
    Row("gguf", "folder", "minisgl_zoo.gguf.folder:gguf_folder"),
    Row("gguf", "named", "minisgl_zoo.gguf.hub:named_checkpoint"),
    Row("gguf", "usual", "minisgl_zoo.gguf.hub:usual_checkpoint"),
    Row("gguf", "checkpoint", "minisgl_zoo.gguf.checkpoint:GgufCheckpoint"),
    Row("cache_groups", "window", "minisgl_zoo.cache_groups.groups:WindowGroup"),
    Row("cache_groups", "manager", "minisgl_zoo.cache_groups.manager:create_manager"),
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
    Row("logit_options", "checks", "minisgl_zoo.logit_checks:CHECKS"),
    Row("logit_options", "words", "minisgl_zoo.logit_checks:ids_of_bad_words"),
    Row("vision", "family", "minisgl_zoo.vision.family:family_of"),
    Row("vision", "reader", "minisgl_zoo.vision.prompt:create_reader"),
    Row("vision", "tower", "minisgl_zoo.vision.tower:create_tower"),
    Row("vision", "bytes", "minisgl_zoo.vision.tower:tower_bytes"),
    Row("vision", "whole", "minisgl_zoo.vision.tower:most_whole"),
    Row("loop_observers", "images", "minisgl_zoo.vision.times:times_of"),
    *(
        Row("vision", f"{name}ForConditionalGeneration", f"minisgl_zoo.vision.{target}")
        for name, target in _VISION.items()
    ),
    Row("adapters", "engine", "minisgl_zoo.lora.device:DeviceAdapters"),
    Row("adapters", "slots", "minisgl_zoo.lora.slots:Slots"),
    Row("loop_observers", "adapters", "minisgl_zoo.lora.observer:checks_of"),
    Row("adapters", "read", "minisgl_zoo.lora.peft:read_adapter"),
    Row("pooling", "checked", "minisgl_zoo.pooling.recipe:checked"),
    Row("pooling", "recipe", "minisgl_zoo.pooling.recipe:read_recipe"),
    Row("pooling", "capabilities", "minisgl_zoo.pooling.recipe:capabilities"),
    Row("pooling", "options", "minisgl_zoo.blocks.encoder:check_options"),
    Row("pooling", "rows", "minisgl_zoo.pooling.rows:pool_rows"),
    Row("drafts", "rule", "minisgl_zoo.drafts.rule:DraftRule"),
    Row("drafts", "bytes", "minisgl_zoo.drafts.draft_model:draft_bytes"),
    Row("drafts", "guesser", "minisgl_zoo.drafts.draft_model:create_guesser"),
    Row(
        "drafters",
        "grammar",
        "minisgl_zoo.drafts.forced:Forced",
        about="the text that a schema, regex or grammar forces",
    ),
    Row(
        "drafters",
        "tree",
        "minisgl_zoo.drafts.tree:Continuation",
        about="what followed the same tokens in an earlier request",
    ),
    Row(
        "drafters",
        "ngram",
        "minisgl_zoo.drafts.history:History",
        about="what followed the last three tokens where they stood before",
    ),
    Row(
        "drafters",
        "mtp",
        "minisgl_zoo.drafts.predicted:Predicted",
        when={"made": "by the model"},
        about="what the checkpoint's layer of multi-token prediction guesses",
    ),
    Row(
        "drafters",
        "draft",
        "minisgl_zoo.drafts.predicted:Drafted",
        when={"made": "by the model"},
        about="what a small model of the same vocabulary guesses (--draft-model)",
    ),
    *(
        Row("encoders", name, f"minisgl_zoo.families.{target}")
        for name, target in _ENCODERS.items()
    ),
    Row("grammars", "check", "minisgl_zoo.grammar.forms:checked_structured_outputs"),
    Row("grammars", "compile", "minisgl_zoo.grammar.compile:compiled"),
    Row("grammars", "maskers", "minisgl_zoo.grammar.maskers:Grammars"),
    Row("tokenizers", "convert", "minisgl_zoo.convert:convert"),
    Row("tokenizers", "stream", "minisgl_zoo.piece_stream:piece_streams"),
    Row("tokenizers", "recommended", "minisgl_zoo.recommended:recommended"),
    *(
        Row(
            "families",
            f"{name}ForCausalLM",
            f"minisgl_zoo.families.{module}:{name.upper()}",
            _SPELLINGS.get(name, ()),
        )
        for module, names in _FAMILIES.items()
        for name in names
    ),
]
