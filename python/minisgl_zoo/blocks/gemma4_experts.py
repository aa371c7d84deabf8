"""Gemma 4's mixture, which runs beside an MLP: its router has its own norm, each expert a scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minisgl.layers import BuildContext, RMSNorm
from minisgl.layers.moe import ExpertNames, MoELayer
from minisgl.models.blocks.mixture import MoeSpec, expert_names, read_experts
from minisgl.models.config import ModelConfig
from minisgl.moe import Experts
from minisgl.quantization import Part


class RouterNorm(RMSNorm):
    """RMS norm that also divides by the square root of the size. The weight stays float32, so that
    there is one rounding instead of three."""

    def __init__(self, build: BuildContext, *, size: int, name: str) -> None:
        super().__init__(replace(build, dtype=torch.float32), size=size, eps=1e-6, name=name)

    def init_buffers(self, device: torch.device) -> None:
        self.weight *= self.weight.shape[0] ** -0.5


class Gemma4Experts(MoELayer):
    """A mixture whose router has its own norm, and whose experts have scales."""

    per_expert_scale: Tensor

    def __init__(
        self, build: BuildContext, *args: Any, hidden_size: int, names: ExpertNames, **options: Any
    ) -> None:
        super().__init__(build, *args, hidden_size=hidden_size, names=names, **options)
        prefix = names.router.removesuffix(".proj.weight")
        num_experts = options["num_experts"]
        self.declare(
            "per_expert_scale",
            torch.float32,
            Part.whole(f"{prefix}.per_expert_scale", num_experts),
        )
        self.router_norm = RouterNorm(build, size=hidden_size, name=f"{prefix}.scale")

    def beside(self, routed_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Route by routed_TD, the output of `router_norm`. Returns the weighted sum of this rank's
        experts, computed from x."""
        return self._backend.forward(x_TD, self.router.linear(routed_TD), self.experts)

    @property
    def experts(self) -> Experts:
        return replace(super().experts, scale=self.per_expert_scale)


def experts_beside(config: ModelConfig) -> MoeSpec | None:
    """Return the mixture that config.json describes, or None. Every layer has it."""
    if not config.fields.flag("enable_moe_block", False):
        return None
    num_experts, top_k = read_experts(config, "num_experts", "gelu_tanh")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=config.fields.integer("moe_intermediate_size"),
        renormalise=True,
        is_sparse=(True,) * config.num_layers,
        names=_names,
        activation="gelu_tanh",
        layer=Gemma4Experts,
    )


def _names(layer: int) -> ExpertNames:
    return expert_names(f"model.layers.{layer}", router="router.proj")
