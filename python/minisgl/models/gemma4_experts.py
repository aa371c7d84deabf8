"""Gemma 4's mixture, which runs beside an MLP: a router with norms and scales of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minisgl.layers import RMSNorm
from minisgl.layers.moe import ExpertNames, MoELayer
from minisgl.models.mixture import MoeSpec, read_experts
from minisgl.quantization import Part

if TYPE_CHECKING:
    from minisgl.layers import BuildContext
    from minisgl.models.config import ModelConfig


class Gemma4Experts(MoELayer):
    """The router sees what the block norms for the experts before that norm."""

    per_expert_scale: Tensor

    def __init__(
        self, build: BuildContext, *args: Any, hidden_size: int, names: ExpertNames, **options: Any
    ) -> None:
        super().__init__(build, *args, hidden_size=hidden_size, names=names, **options)
        self.ops, self.root = build.ops, hidden_size**-0.5
        prefix = names.router.removesuffix(".proj.weight")
        num_experts = options["num_experts"]
        self.declare(
            "per_expert_scale",
            torch.float32,
            Part.whole(f"{prefix}.per_expert_scale", num_experts),
        )
        self.router_norm = RMSNorm(build, size=hidden_size, eps=1e-6, name=f"{prefix}.scale")

    def beside(self, x_TD: Tensor, normed_TD: Tensor) -> Tensor:
        """Route x. Returns the weighted sum of this rank's experts of normed_TD."""
        experts = self.experts
        logits_TE = self.router.linear(self.router_norm.forward(x_TD) * self.root)
        weights_TK, ids_TK = self.ops.route(logits_TE, experts.top_k, experts.renormalise)
        weights_TK = weights_TK * self.per_expert_scale[ids_TK]
        return self._backend.routed(normed_TD, weights_TK, ids_TK, experts)


def experts_beside(config: ModelConfig) -> MoeSpec | None:
    """The mixture of each layer, if config.json has one."""
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
    prefix = f"model.layers.{layer}"
    return ExpertNames(
        router=f"{prefix}.router.proj.weight",
        router_alias=None,
        gate=f"{prefix}.experts.{{}}.gate_proj.weight",
        up=f"{prefix}.experts.{{}}.up_proj.weight",
        down=f"{prefix}.experts.{{}}.down_proj.weight",
        all_gate_up=f"{prefix}.experts.gate_up_proj",
        all_down=f"{prefix}.experts.down_proj",
    )
