"""Nemotron-H, Nemotron Nano 2, Nemotron 3: Mamba2 in most layers, attention without rotation in a
few, and MLPs or mixtures with squared ReLU between them.

Time steps have no bounds, as released files say (`time_step_limit` is 0 to infinity); transformers
5.24 raises them to `time_step_min` at least, so tokens with smaller steps differ there. A file
counts an MLP or a mixture as a layer of its own. Here it belongs to the block of the layer before
it. The experts of Nemotron 3 have squared ReLU and no gate, and may compute in a smaller (latent)
space; its router has sigmoids; every token takes a shared expert.

Axes: T tokens, D hidden size, F intermediate size, P latent size.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from minisgl.layers import (
    BaseOP,
    BuildContext,
    LinearColParallelMerged,
    RMSNormFused,
    StateLessOP,
)
from minisgl.layers.moe import ExpertNames, SharedExpert
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.blocks.mixture import MoeSpec, expert_names, read_experts
from minisgl.models.config import ModelConfig
from minisgl.models.spec import Family, LayerSpec, ModelSpec, layers_of
from minisgl.moe import SquaredRelu
from minisgl.quantization import Part
from minisgl_zoo.blocks.layer_kinds import no_rotation
from minisgl_zoo.blocks.mamba2 import Mamba2, MambaSpec, letter_of
from minisgl_zoo.blocks.routers import SigmoidExperts


def layer_kinds(config: ModelConfig) -> str:
    """Return a letter for each layer of the file: M (Mamba2), * (attention), - (MLP), E (mixture).
    Raises ConfigError for another letter, and for an MLP or a mixture that does not follow Mamba2
    or attention."""
    fields, name = config.fields, "hybrid_override_pattern"
    kinds = fields.values.get(name)
    if kinds is None:
        name = "layers_block_type"
        types = fields.values.get(name)
        kinds = "".join(map(letter_of, types)) if isinstance(types, list) else None
    if not isinstance(kinds, str) or not kinds or not {*kinds} <= {*"M*-E"}:
        raise fields.error(name, "the kinds of layers, as in M-M*-")
    if "*" not in kinds or re.search("(^|[-E])[-E]", kinds):
        raise fields.error(name, "one with attention, whose MLPs follow Mamba2 or attention")
    return kinds


def blocks_of(kinds: str) -> list[int]:
    """Return the indices of the file's layers that begin a block."""
    return [index for index, kind in enumerate(kinds) if kind in "M*"]


def nemotron_layers(config: ModelConfig, kinds: str) -> tuple[LayerSpec, ...]:
    """Return the blocks' layers. kinds: see `layer_kinds`. Raises ConfigError."""
    fields = config.fields
    for name, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if fields.values.get(name, only) != only:
            raise fields.error(name, only)
    if not fields.flag("use_conv_bias", True):
        raise fields.error("use_conv_bias", "true: convolutions without a bias are not served")
    mamba = MambaSpec(
        value_dim=fields.integer("mamba_head_dim"),
        taps=fields.integer("conv_kernel", minimum=2),
        fused=False,
        bias=(bias := fields.flag("use_bias", False)),
        out_bias=bias,
    )
    num_heads, num_groups = fields.integer("mamba_num_heads"), fields.integer("n_groups")
    if num_heads % num_groups:
        raise fields.error("n_groups", f"a divisor of {num_heads} Mamba heads")

    def of_kind(layer: LayerSpec, kind: str) -> LayerSpec:
        if kind == "*":
            return replace(layer, block=MambaAttentionBlock)
        return replace(
            layer,
            num_heads=num_heads,
            num_kv_heads=num_groups,
            head_dim=fields.integer("ssm_state_size"),
            block=MambaBlock,
            recurrent=mamba,
        )

    layers = layers_of(config)
    return tuple(of_kind(layers[index], kinds[index]) for index in blocks_of(kinds))


class SquaredReluMLP(BaseOP):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__()
        config, bias = at.spec.config, at.spec.mlp_bias
        self.up = LinearColParallelMerged(
            at.build,
            in_size=config.hidden_size,
            out_size=config.intermediate_size,
            bias=bias,
            names=(f"{at.layer.prefix}.mixer.up_proj",),
        )
        inner, share = config.intermediate_size, self.up.columns
        self.down = at.back("mixer.down_proj", in_size=inner, share=share, bias=bias)

    def forward(
        self, norm: RMSNormFused, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, then the MLP. Returns (output, residual)."""
        x_TF, residual_TD = self.up.forward_normed(norm, x_TD, residual_TD)
        return self.down.forward(F.relu(x_TF).square()), residual_TD


class NoMLP(StateLessOP):
    """Returns (x, residual)."""

    def forward(self, norm: object, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        return x_TD, residual_TD


class MambaAttentionBlock(Block):
    """norm, attention; if the file's next layer is an MLP or a mixture, then norm and that
    layer."""

    def __init__(self, at: LayerBuild) -> None:
        BaseOP.__init__(self)
        before, _, index = at.layer.prefix.rpartition(".")
        self.attention_norm = at.norm(self.norm_type, "norm")
        self.attention = self.attention_type(at)
        self.mlp_norm = self.mlp = NoMLP()  # type: ignore[assignment] # takes the place of both
        follower = layer_kinds(at.spec.config)[int(index) + 1 :][:1]
        if follower not in ("-", "E"):
            return
        mlp = replace(at, layer=replace(at.layer, prefix=f"{before}.{int(index) + 1}"))
        self.mlp_norm = mlp.norm(self.norm_type, "norm")
        if follower == "E":
            assert at.mixture
            self.mlp = at.mixture(at.index)
        else:
            self.mlp = SquaredReluMLP(mlp)  # type: ignore[assignment] # has their `forward`


class MambaBlock(MambaAttentionBlock):
    attention_type = staticmethod(partial(Mamba2, module="mixer"))


class SquaredReluExpert(SharedExpert):
    """down(relu(up(x)) ** 2) of every token. Returns this rank's partial sum."""

    module = "shared_experts"

    def _declare(self, build: BuildContext, prefix: str, hidden_size: int, inner_size: int) -> None:
        up, down = (f"{prefix}.{self.module}.{kind}_proj" for kind in ("up", "down"))
        columns, shape = build.columns(inner_size, up), (inner_size, hidden_size)
        self.up = build.linear(Part(name=f"{up}.weight", shape=shape, axis=0, share=columns))
        part = Part(name=f"{down}.weight", shape=shape[::-1], axis=1, share=columns)
        self.down = build.linear(part)

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


def spec(config: ModelConfig) -> ModelSpec:
    kinds = layer_kinds(config)
    config = replace(config, num_layers=len(kinds), rope=no_rotation(config))
    return ModelSpec(
        config=config,
        layers=nemotron_layers(config, kinds),
        moe=nemotron_mixture(config, kinds) if "E" in kinds else None,
        mlp_bias=config.fields.flag("mlp_bias", False),
    )


NAMES = {
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    ".mixer.norm.": ".mixer.gated_norm.",
    **{f".mixer.{x}_proj.": f".self_attn.{x}_proj." for x in "qkvo"},
}


NEMOTRONH = Family(
    spec=spec,
    defaults={
        "num_hidden_layers": 1,  # transformers 5 writes only the layers' kinds
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    renames={"layer_norm_epsilon": "rms_norm_eps", "attention_head_dim": "head_dim"},
    names=NAMES,
)
