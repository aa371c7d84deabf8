"""The mixture of Nemotron 3: its experts have squared ReLU and no gate, and may compute in a
smaller (latent) space; its router has sigmoids; every token takes a shared expert.

Axes: T tokens, D hidden size, F intermediate size, P latent size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minisgl.layers.moe import ExpertNames, SharedExpert
from minisgl.models.mixture import MoeSpec, expert_names, read_experts
from minisgl.moe import SquaredRelu
from minisgl.quantization import Part
from minisgl_zoo.blocks.nemotron_block import blocks_of
from minisgl_zoo.blocks.sigmoid_experts import SigmoidExperts

if TYPE_CHECKING:
    from minisgl.layers import BuildContext
    from minisgl.models.config import ModelConfig


class SquaredReluExpert(SharedExpert):
    """down(relu(up(x)) ** 2) of every token. Returns this rank's partial sum."""

    module = "shared_experts"

    def _declare(self, build: BuildContext, prefix: str, hidden_size: int, inner_size: int) -> None:
        up, down = (f"{prefix}.{self.module}.{kind}_proj" for kind in ("up", "down"))
        columns, shape = build.columns(inner_size, up), (inner_size, hidden_size)
        self.up = build.weight(Part(name=f"{up}.weight", shape=shape, axis=0, share=columns))
        part = Part(name=f"{down}.weight", shape=shape[::-1], axis=1, share=columns)
        self.down = build.weight(part)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down.linear(SquaredRelu()(self.up.linear(x_TD)))


class NemotronExperts(SigmoidExperts):
    def __init__(
        self,
        build: BuildContext,
        *args: Any,
        config: ModelConfig,
        names: ExpertNames,
        **options: Any,
    ) -> None:
        latent = config.fields.optional_integer("moe_latent_size")
        super().__init__(build, *args, config=config, names=names, expert_size=latent, **options)
        self.is_latent = latent is not None
        if latent is not None:
            prefix, hidden = names.router.removesuffix(".gate.weight"), options["hidden_size"]
            into = Part.whole(f"{prefix}.fc1_latent_proj.weight", latent, hidden)
            self.into = build.weight(into)
            out = Part.whole(f"{prefix}.fc2_latent_proj.weight", hidden, latent)
            self.out = build.weight(out)

    def compute(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        if not self.is_latent:
            return super().compute(x_TD, weights_TK, ids_TK)
        # The projection back is linear, so each rank applies it to its partial sum.
        x_TP = super().compute(self.into.linear(x_TD), weights_TK, ids_TK)
        return self.out.linear(x_TP)


def _names(prefixes: tuple[str, ...], index: int) -> ExpertNames:
    names = expert_names(prefixes[index])
    return replace(names, gate=None, all_gate_up=f"{prefixes[index]}.experts.up_proj")


def nemotron_mixture(config: ModelConfig, kinds: str) -> MoeSpec:
    """Return the mixture that config.json describes. kinds: see `nemotron_block.layer_kinds`.
    Raises ConfigError."""
    fields = config.fields
    followers = [(index + 1, kinds[index + 1 :][:1]) for index in blocks_of(kinds)]
    prefixes = tuple(f"model.layers.{i}.mixer" if kind == "E" else "" for i, kind in followers)
    num_experts, top_k = read_experts(config, "n_routed_experts")
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "false: mixtures of Nemotron-H with biases are not served")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=fields.integer("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", True),
        is_sparse=tuple(map(bool, prefixes)),
        names=partial(_names, prefixes),
        prefix=prefixes.__getitem__,
        activation=SquaredRelu(),
        layer=partial(NemotronExperts, config=config),
        shared=SquaredReluExpert,
        shared_size=fields.integer("moe_shared_expert_intermediate_size"),
    )
