"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

ROWS: Final = [
    Row("families", "LlamaForCausalLM", "minisgl.models.families.dense:FAMILY", ("LLaMAForCausalLM",)),
    Row("families", "MistralForCausalLM", "minisgl.models.families.mistral:FAMILY"),
    Row("families", "MixtralForCausalLM", "minisgl.models.families.mixtures:FAMILY"),
    Row("families", "Qwen2ForCausalLM", "minisgl.models.families.qwen2:FAMILY"),
    Row("families", "Qwen2MoeForCausalLM", "minisgl.models.families.qwen2_moe:FAMILY"),
    Row("families", "Qwen3ForCausalLM", "minisgl.models.families.qwen3:FAMILY"),
    Row("families", "Qwen3MoeForCausalLM", "minisgl.models.families.qwen3_moe:FAMILY"),
    Row("routes", "chat", "minisgl.server.api.chat:ROUTES"),
    Row("routes", "completions", "minisgl.server.api.completions:ROUTES"),
    Row("routes", "generate", "minisgl.server.api.generate:ROUTES"),
    Row("routes", "models", "minisgl.server.api.models:ROUTES"),
    Row("routes", "tokens", "minisgl.server.api.tokens:ROUTES"),
    Row("routes", "metrics", "minisgl.server.telemetry.metrics:ROUTES"),
    Row("servers", "own", "minisgl.server.launch:launch_server"),
    Row("servers", "shell", "minisgl.cli.clients:serve_with_shell"),
    Row(
        "commands", "serve", "minisgl.cli.serve:serve",
        about="[MODEL]  serve a model over OpenAI's HTTP API (no command means serve)",
    ),
    Row(
        "commands", "chat", "minisgl.cli.clients:chat",
        about="[MODEL]  chat with a model in this terminal",
    ),
    Row(
        "commands", "run", "minisgl.cli.clients:run",
        about="[MODEL] [QUESTION]  print one answer; a pipe can ask, too",
    ),
]  # fmt: skip
