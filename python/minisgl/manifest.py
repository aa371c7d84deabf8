"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

ROWS: Final = [
    Row("families", "LlamaForCausalLM", "minisgl.models.llama:FAMILY", ("LLaMAForCausalLM",)),
    Row("families", "MistralForCausalLM", "minisgl.models.mistral:FAMILY"),
    Row("families", "MixtralForCausalLM", "minisgl.models.mixtral:FAMILY"),
    Row("families", "Qwen2ForCausalLM", "minisgl.models.qwen2:FAMILY"),
    Row("families", "Qwen2MoeForCausalLM", "minisgl.models.qwen2_moe:FAMILY"),
    Row("families", "Qwen3ForCausalLM", "minisgl.models.qwen3:FAMILY"),
    Row("families", "Qwen3MoeForCausalLM", "minisgl.models.qwen3_moe:FAMILY"),
]
