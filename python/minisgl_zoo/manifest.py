"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

_FAMILIES: Final = (
    ("Cohere", "cohere", "Cohere (Command R, Command R+, Aya): attention and MLP side by side on "
     "one layer norm, interleaved rotation; in Command R+ each head of queries and keys has a "
     "layer norm."),
    ("Cohere2", "cohere", "Cohere 2 (Command R7B, Command A): Cohere with windows in three of "
     "four layers. Only the layers with a window rotate."),
    ("Cohere2Moe", "cohere", "Cohere 2 (mixtures): Cohere 2 with a mixture in all but the "
     "first layers, whose router has softmax or sigmoids, and with experts that every token "
     "takes."),
    ("Ernie4_5_Moe", "sigmoid_mixtures", "ERNIE 4.5 (mixtures): ERNIE 4.5 with a mixture in most "
     "layers, whose router has softmax and a correction, and experts that every token takes."),
    ("Exaone4", "exaone", "EXAONE 4: norms after attention and MLP, norms on heads. If some "
     "layers have a window, only those rotate."),
    ("ExaoneMoe", "exaone", "K-EXAONE: EXAONE 4's attention, after a norm; all but the first "
     "layers have a mixture, whose router has sigmoids and a correction, and an expert that "
     "every token takes."),
    ("FalconH1", "falcon_h1", "Falcon-H1: Mamba2 and attention side by side after one norm, with "
     "constant factors everywhere."),
    ("Gemma", "gemma", "Gemma 1: a Llama with GELU, a scaled embedding, and norms whose weights "
     "are stored minus 1."),
    ("Gemma2", "gemma", "Gemma 2: norms before and after attention and MLP, windows in every "
     "other layer, softcaps on attention scores and on logits."),
    ("Gemma3", "gemma", "Gemma 3 (text): norms before and after attention and MLP; five of six "
     "layers have a window and their own rotation."),
    ("Gemma4", "gemma", "Gemma 4 (text): layers without a window have wide heads; keys may serve "
     "as values, and layers may share them; each layer may have its own embedding; a mixture may "
     "run beside the MLP."),
    ("Gemma4Unified", "gemma", "Gemma 4 12B (text): Gemma 4 without embeddings of the layers and "
     "without a mixture."),
    ("GptOss", "gpt_oss", "gpt-oss: sinks in attention, windows in every other layer, biased "
     "experts with a clamped gate."),
    ("Granite", "granite", "Granite 3 (dense): a Llama with multipliers: for the embedding, for "
     "attention scores, for the outputs of attention and MLP, and for the logits."),
    ("GraniteMoe", "granite", "Granite 3 (granitemoe): Granite with a mixture in each layer."),
    ("GraniteMoeHybrid", "granite", "Granite 4: Granite, in which most layers may have Mamba2 (H "
     "models), the MLP may have a mixture beside it, and attention may not rotate."),
    ("GraniteMoeSWA", "granite", "Granite Swash MoE: Granite Swash with a mixture in each layer, "
     "and maybe an expert that every token takes."),
    ("GraniteSWA", "granite", "Granite Swash: Granite 3 whose heads have sinks, with windows in "
     "three of four layers; a layer may have a rotation of its own, or none."),
    ("HunYuanDenseV1", "hunyuan", "Hunyuan (dense): a Llama whose queries and keys are normed per "
     "head after their rotation; files may give a number alpha that raises the rotation's base."),
    ("HunYuanMoEV1", "hunyuan", "Hunyuan-A13B: Hunyuan with a mixture in each layer, and an "
     "expert that every token takes."),
    ("DeepseekV2", "latents", "DeepSeek-V2 and DeepSeek-Coder-V2: DeepSeek-V3's attention; all "
     "but the first layers have a mixture, whose router has softmax, and experts that every "
     "token takes."),
    ("DeepseekV3", "latents", "DeepSeek-V3, DeepSeek-R1, Kimi K2 and Moonlight: attention to "
     "latents; all but the first layers have GLM-4.5's mixture."),
    ("Glm4MoeLite", "latents", "GLM-4.7-Flash: DeepSeek-V3's attention and mixtures."),
    ("Mistral4", "latents", "Mistral 4 (Mistral Small 4): DeepSeek-V3's attention with Ministral "
     "3's scale of queries; its mixtures have a router of softmax, and an expert that every "
     "token takes."),
    ("Youtu", "latents", "Youtu (Youtu-LLM): DeepSeek-V3's attention, and an MLP in each layer."),
    ("Lfm2", "lfm", "LFM2: gated short convolutions in most layers; the others have attention, "
     "whose heads are normed."),
    ("Lfm2Moe", "lfm", "LFM2-MoE: LFM2 with a mixture in all but the first layers; its router has "
     "sigmoids and a correction."),
    ("Lfm3", "lfm", "LFM3: gated short convolutions, attention within a window and attention to "
     "all take turns; each head's output has a gate; norms before and after both halves of a "
     "block."),
    ("MiniMaxM2", "sigmoid_mixtures", "MiniMax-M2: a mixture with a sigmoid router in each layer; "
     "queries and keys are normed over all heads, and half of a head rotates."),
    ("Ministral3", "plain", "Ministral 3: a Mistral with YaRN, whose queries are scaled by "
     "the logarithm of their position (as in Llama 4)."),
    ("MuseGlimmer", "muse_glimmer", "Muse-Glimmer (text): Gemma 2's order of norms; embedding, "
     "queries and keys are normed without a weight; attention's output has a gate; layers "
     "without a window do not rotate."),
    ("NemotronH", "nemotron_h", "Nemotron-H, Nemotron Nano 2, Nemotron 3: Mamba2 in most layers, "
     "attention without rotation in a few, and MLPs or mixtures with squared ReLU between them. "
     "Time steps have no bounds, as released files say (`time_step_limit` is 0 to infinity); "
     "transformers 5.24 raises them to `time_step_min` at least, so tokens with smaller steps "
     "differ there."),
    ("Cwm", "plain", "CWM (Code World Model): a Llama with windows in three of four layers; the "
     "first has none."),
    ("Ernie4_5", "plain", "ERNIE 4.5 (dense): a Llama whose heads rotate interleaved pairs."),
    ("Glm", "plain", "GLM-4-9B (2024): half of a head rotates, in interleaved pairs; gate and up "
     "are one tensor, as transformers has them."),
    ("Glm4", "plain", "GLM-4-0414: the attention of GLM-4-9B, and norms before and after "
     "attention and MLP."),
    ("InternLM3", "plain", "InternLM3: a Llama whose biases have names of their own in "
     "config.json."),
    ("MiMo", "plain", "MiMo (MiMo-7B): Qwen2; the layers of multi-token prediction are skipped."),
    ("Ministral", "plain", "Ministral (8B, 2410): a Mistral in which only some layers may have a "
     "window."),
    ("Olmo2", "plain", "OLMo 2: norms after attention and MLP; queries and keys are normed over "
     "all heads together."),
    ("Olmo3", "plain", "OLMo 3: OLMo 2 with windows in three of four layers, whose rotation is "
     "never stretched."),
    ("Olmoe", "plain", "OLMoE: a Llama with a mixture in each layer; queries and keys are normed "
     "over all heads."),
    ("Phi3", "plain", "Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama with fused tensors, longrope "
     "and partial rotation. The context is the original one (4,096 tokens) unless "
     "`--max-seq-len` asks for the long one."),
    ("SeedOss", "plain", "Seed-OSS: a Llama in which each kind of projection may have biases."),
    ("SmolLM3", "plain", "SmolLM3: a Llama in which every fourth layer does not rotate (NoPE)."),
    ("Mellum", "qwen", "Mellum 2: Qwen3-MoE in which layers may have a window and a rotation of "
     "their own, and each layer says whether it has a mixture."),
    ("Qwen3Next", "qwen", "Qwen3-Next: gated delta nets in three of four layers, gated attention "
     "in the others, a mixture in most."),
    ("Qwen3VLMoeText", "qwen", "Qwen3-VL (mixtures, text): Qwen3-MoE; in the files an expert's "
     "matrices are transposed."),
    ("Qwen3_5", "qwen", "Qwen3.5 and Qwen3.6 (dense, text): gated delta nets in three of four "
     "layers, gated attention in the others."),
    ("Qwen3_5Moe", "qwen", "Qwen3.5-MoE and Qwen3.6-MoE (text): Qwen3.5 with a mixture in every "
     "layer, and an expert that every token takes."),
    ("Afmoe", "sigmoid_mixtures", "AFMoE (Trinity Nano, Trinity Mini): Gemma 2's order of norms; "
     "attention's output has a gate; only the layers with a window rotate; all but the first "
     "layers have GLM-4.5's mixture."),
    ("BailingMoeV2", "sigmoid_mixtures", "Ling 2.0 and Ring 2.0: GLM-4.5's attention, with norms "
     "on heads, and its mixture in all but the first layers; q, k and v are one tensor."),
    ("Dots1", "sigmoid_mixtures", "dots.llm1 (Dots1): Qwen3's attention; all but the first layers "
     "have GLM-4.5's mixture."),
    ("Glm4Moe", "sigmoid_mixtures", "GLM-4.5, GLM-4.6 and GLM-4.7: all but the first layers have "
     "a mixture, whose router has sigmoids and a correction, and an expert that every token "
     "takes."),
    ("HYV3", "sigmoid_mixtures", "Hy3: GLM-4.5's mixture in all but the first layer, and Qwen3's "
     "attention."),
    ("SolarOpen", "sigmoid_mixtures", "Solar Open: GLM-4.5's mixture in each layer, and Llama's "
     "attention."),
)  # fmt: skip
"""The architecture without "ForCausalLM", the module in `families` that has it under its name in
capitals, and what it is."""
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
    Row("pooling", "rows", "minisgl_zoo.pooling.rows:pool_rows"),
    Row("drafts", "rule", "minisgl_zoo.drafts.rule:DraftRule"),
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
            about=about,
        )
        for name, module, about in _FAMILIES
    ),
]
