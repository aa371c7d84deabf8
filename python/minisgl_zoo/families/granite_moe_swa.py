"""Granite Swash MoE: Granite Swash with a mixture in each layer, and maybe an expert that every
token takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl_zoo.families import granite_moe, granite_swa
from minisgl_zoo.families.granite_moe_hybrid import granite_mixture, separate_mlp

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import ModelSpec
    from minisgl_zoo.view import CheckpointView


def spec(config: ModelConfig) -> ModelSpec:
    return replace(granite_swa.spec(config), moe=granite_mixture(config))


def _view(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    has_shared = config.fields.integer("shared_intermediate_size", minimum=0) > 0
    return separate_mlp(view, config) if has_shared else view


FAMILY = replace(
    granite_moe.FAMILY,
    architectures=("GraniteMoeSWAForCausalLM",),
    spec=spec,
    view=_view,
    defaults={
        **granite_moe.FAMILY.defaults,
        "sliding_window": 128,
        "shared_intermediate_size": 0,
    },
)
