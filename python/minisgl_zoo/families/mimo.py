"""MiMo (MiMo-7B): Qwen2; the layers of multi-token prediction are skipped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families.dense import QWEN2

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl_zoo.view import CheckpointView


def _without_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    view.drop("model.mtp_layers.")
    return view


FAMILY = replace(QWEN2, architectures=("MiMoForCausalLM",), view=_without_drafts)
