"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

ROWS: Final = [
    Row(
        "families", "LlamaForCausalLM", "minisgl.models.families.dense:LLAMA",
        ("LLaMAForCausalLM", "LlamaModel"),
    ),
    Row(
        "families", "MistralForCausalLM", "minisgl.models.families.dense:MISTRAL",
        ("MistralModel",),
    ),
    Row("families", "MixtralForCausalLM", "minisgl.models.families.mixtures:MIXTRAL"),
    Row("families", "Qwen2ForCausalLM", "minisgl.models.families.dense:QWEN2", ("Qwen2Model",)),
    Row("families", "Qwen2MoeForCausalLM", "minisgl.models.families.mixtures:QWEN2_MOE"),
    Row("families", "Qwen3ForCausalLM", "minisgl.models.families.dense:QWEN3", ("Qwen3Model",)),
    Row("families", "Qwen3MoeForCausalLM", "minisgl.models.families.mixtures:QWEN3_MOE"),
    Row("routes", "chat", "minisgl.server.api.chat:ROUTES"),
    Row("routes", "completions", "minisgl.server.api.completions:ROUTES"),
    Row("routes", "generate", "minisgl.server.api.generate:ROUTES"),
    Row("routes", "models", "minisgl.server.api.models:ROUTES"),
    Row("routes", "metrics", "minisgl.server.api.metrics:ROUTES"),
    Row("servers", "own", "minisgl.server.launch:launch_server"),
    Row(
        "commands", "serve", "minisgl.cli.serve:serve",
        about="[MODEL]  serve a model over OpenAI's HTTP API (the default)",
    ),
]  # fmt: skip
