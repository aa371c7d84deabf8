"""Gemma 4 12B (text): Gemma 4 without embeddings of the layers and without a mixture."""

from __future__ import annotations

from dataclasses import replace

from minisgl_zoo.families import gemma4

FAMILY = replace(
    gemma4.FAMILY,
    architectures=("Gemma4UnifiedForCausalLM",),
    defaults={
        **gemma4.FAMILY.defaults,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)
