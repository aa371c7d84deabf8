"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

ROWS: Final = [
    Row(
        "families", "LlamaForCausalLM", "minisgl.models.families.dense:LLAMA",
        ("LLaMAForCausalLM", "LlamaModel"),
        about="Llama 1, Llama 2 and Llama 3 (Llama 3.1, Llama 3.2, Llama 3.3): no norms on heads, "
        "no window, biases where config.json asks for them.",
    ),
    Row(
        "families", "MistralForCausalLM", "minisgl.models.families.dense:MISTRAL",
        ("MistralModel",),
        about="Mistral: a Llama without biases, whose layers all attend within a window (unless "
        "it is null).",
    ),
    Row(
        "families", "MixtralForCausalLM", "minisgl.models.families.mixtures:MIXTRAL",
        about="Mixtral: a Mistral whose layers all have a mixture in place of the MLP.",
    ),
    Row(
        "families", "Qwen2ForCausalLM", "minisgl.models.families.dense:QWEN2",
        ("Qwen2Model",),
        about="Qwen2 and Qwen2.5: biases on q, k and v; some layers may attend within a window.",
    ),
    Row(
        "families", "Qwen2MoeForCausalLM", "minisgl.models.families.mixtures:QWEN2_MOE",
        about="Qwen2-MoE: Qwen2 with a mixture in most layers, and an expert that every token "
        "takes.",
    ),
    Row(
        "families", "Qwen3ForCausalLM", "minisgl.models.families.dense:QWEN3",
        ("Qwen3Model",),
        about="Qwen3 (dense): queries and keys are normed per head; windows as in Qwen2.",
    ),
    Row(
        "families", "Qwen3MoeForCausalLM", "minisgl.models.families.mixtures:QWEN3_MOE",
        about="Qwen3-MoE: Qwen3 with a mixture in most layers.",
    ),
    Row("routes", "chat", "minisgl.server.api.chat:ROUTES"),
    Row("routes", "completions", "minisgl.server.api.completions:ROUTES"),
    Row("routes", "generate", "minisgl.server.api.generate:ROUTES"),
    Row("routes", "models", "minisgl.server.api.models:ROUTES"),
    Row("routes", "metrics", "minisgl.server.api.metrics:ROUTES"),
    Row("servers", "own", "minisgl.server.launch:launch_server"),
    Row(
        "commands", "serve", "minisgl.cli.serve:serve",
        about="[MODEL]  serve a model over OpenAI's HTTP API (no command means serve)",
    ),
]  # fmt: skip
