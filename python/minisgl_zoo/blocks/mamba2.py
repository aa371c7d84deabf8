"""A Mamba2 mixer (Dao & Gu, 2024), which replaces attention or runs beside it.

One projection computes the inputs of a short convolution (C, B and x, in the places of queries,
keys and values), an output gate z and the time steps dt. The state S of a head decays by exp(A dt),
then dt B x^T is added; the output C^T S + D x is gated, normed per group, and projected.

Heads are split over ranks like those of attention, with the group (B and C) that they read.

Axes: T tokens, N heads, K groups, H state size, V head dim, D inputs of the convolution, C channels
of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.core import Batch
from minisgl.layers.linear import Linear
from minisgl.layers.norm import RMSNormFused
from minisgl.layers.shard import split_heads, times
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.config import Fields, ModelConfig
from minisgl.models.spec import LayerSpec
from minisgl.quantization import Part
from minisgl_zoo.blocks.convolved import ConvolvedOP, shift
from minisgl_zoo.recurrent.backend import RecurrentInputs
from minisgl_zoo.recurrent.spec import DeltaSpec


class Mamba2(ConvolvedOP):
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor | None = None

    def __init__(self, at: LayerBuild, *, module: str) -> None:
        """module: the name of the layer's module in the checkpoint."""
        super().__init__()
        build, layer, mamba = at.build, at.layer, at.layer.recurrent
        assert isinstance(mamba, MambaSpec)
        prefix, hidden_size = f"{layer.prefix}.{module}", at.spec.config.hidden_size
        num_heads, num_groups = layer.num_heads, layer.num_kv_heads
        state_size, head_dim = layer.head_dim, mamba.value_dim
        self.comm = comm = build.comm
        heads = split_heads(num_heads, num_groups, comm.size)[comm.rank]
        self.eps, self._norm_first = at.spec.config.norm_eps, mamba.norm == "before"
        self._groups, self._num_groups = heads.kv, num_groups
        self._group_width = num_heads // num_groups * head_dim
        self.layer = mamba.on_rank(layer, heads, at.place)
        inner, groups = num_heads * head_dim, num_groups * state_size
        width = inner + 2 * groups
        values, keys = times(heads.q, head_dim), times(heads.kv, state_size)
        # The files have x, B and C in this order, after z and before the time steps.
        channels = (shift(keys, inner + groups), shift(keys, inner), values)
        rows = [shift(span, inner) for span in channels]
        rows += [values, shift(heads.q, inner + width)]
        name, shape = f"{prefix}.in_proj.weight", (inner + width + num_heads, hidden_size)
        parts = [Part(name=name, shape=shape, axis=0, share=span) for span in rows]
        self.projection = Linear(build, *parts, bias=mamba.bias)
        self.declare_conv(
            build, name=f"{prefix}.conv1d", spans=channels, size=(width, mamba.taps), bias=True
        )
        for attr, name in (("a_log", "A_log"), ("dt_bias", "dt_bias"), ("skip", "D")):
            part = Part(name=f"{prefix}.{name}", shape=(num_heads,), axis=0, share=heads.q)
            self.declare(attr, torch.float32, part)
        if mamba.norm:
            part = Part(name=f"{prefix}.gated_norm.weight", shape=(inner,), axis=0, share=values)
            self.declare("norm", build.dtype, part)
        name = f"{module}.out_proj"
        self.out = at.back(name, in_size=inner, share=values, bias=mamba.out_bias)

    def forward(
        self,
        norm: RMSNormFused,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.forward`."""
        layer = self.layer
        projected, residual_TD = self.projection.forward_normed(norm, x_TD, residual_TD)
        width, inner = sum(layer.sizes), layer.sizes[2]
        inputs_TD, z, dt_TN = projected.tensor_split([width, width + inner], dim=-1)
        dt_TN = F.softplus(dt_TN.float() + self.dt_bias)
        view = batch.pools[layer.pool]
        inputs = RecurrentInputs(
            x_TD=inputs_TD,
            g_TN=-self.a_log.exp() * dt_TN,
            beta_TN=dt_TN,
            weight_WD=self.conv,
            bias_D=self.conv_bias,
            skip_N=self.skip,
        )
        out_TNV = view.context.attn.forward(inputs, layer, view)
        residual_TD, out_TNV, z = norm.select(rows_S, residual_TD, out_TNV, z)
        gate, y = F.silu(z.float()), out_TNV.flatten(1).float()
        gated = self._normed(y) * gate if self._norm_first else self._normed(y * gate)
        return self.out.forward(gated.to(out_TNV.dtype)), residual_TD

    def _normed(self, x: Tensor) -> Tensor:
        """Return x, float32 [T, N * V], normed per group if the layer has a norm."""
        if self.norm is None:
            return x
        own = self._groups
        x_TKC = x.view(len(x), len(own), x.shape[1] // len(own))
        sum_TK = x_TKC.square().sum(-1)
        if self.comm.size > self._num_groups:  # ranks have parts of a group
            every_TK = sum_TK.new_zeros(len(x), self._num_groups)
            every_TK[:, own.start : own.stop] = sum_TK
            sum_TK = self.comm.all_reduce(every_TK)[:, own.start : own.stop]
        x_TKC = x_TKC * torch.rsqrt(sum_TK / self._group_width + self.eps)[..., None]
        return x_TKC.flatten(1) * self.norm.float()


KINDS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""A kind of layer in `layers_block_type` -> its letter in `hybrid_override_pattern`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(DeltaSpec):
    """Mamba2. `LayerSpec.num_heads` are its heads, `num_kv_heads` its groups, and `head_dim` is the
    size of a state.

    value_dim: the size of a head. bias, out_bias: whether the projections have biases. norm:
    whether each group is normed after the gate, before it, or not.
    """

    bias: bool
    out_bias: bool
    norm: Literal["after", "before", None] = "after"


def letter_of(kind: object) -> str:
    """Return the letter of an entry of `layers_block_type`; "?" for an unknown one."""
    return KINDS.get(kind, "?") if isinstance(kind, str) else "?"


NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""The values of `time_step_limit` with which time steps are not clamped. transformers writes the
second."""


def as_mamba(config: ModelConfig, layer: LayerSpec, block: type[Block], **more: Any) -> LayerSpec:
    """Return `layer` with Mamba2 of the sizes in config.json's fields mamba_*. block: its class.
    more: further fields of `MambaSpec`. Raises ConfigError."""
    check_mamba(config.fields)
    num_heads, head_dim, num_groups, state_size = mamba_sizes(config)
    mamba = MambaSpec(
        value_dim=head_dim,
        taps=config.fields.integer("mamba_d_conv", minimum=2),
        fused=False,
        bias=config.fields.flag("mamba_proj_bias", False),
        **more,
    )
    return replace(
        layer,
        num_heads=num_heads,
        num_kv_heads=num_groups,
        head_dim=state_size,
        block=block,
        recurrent=mamba,
    )


def mamba_sizes(config: ModelConfig) -> tuple[int, int, int, int]:
    """Return (number of heads, size of a head, number of groups, size of a state)."""
    fields = config.fields
    num_heads, num_groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    expanded = fields.integer("mamba_expand", 2) * config.hidden_size
    inner = fields.optional_integer("mamba_d_ssm") or expanded
    if inner % num_heads:
        raise fields.error("mamba_n_heads", f"a divisor of {inner} inner channels")
    if fields.values.get("mamba_d_head") not in (None, "auto", inner // num_heads):
        raise fields.error("mamba_d_head", f"{inner // num_heads}, as {inner} / {num_heads}")
    if num_heads % num_groups:
        raise fields.error("mamba_n_groups", f"a divisor of {num_heads} Mamba heads")
    return num_heads, inner // num_heads, num_groups, fields.integer("mamba_d_state")


def check_mamba(fields: Fields) -> None:
    """Raise ConfigError for convolutions without a bias and for clamped time steps."""
    if not fields.flag("mamba_conv_bias", True):
        raise fields.error("mamba_conv_bias", "true: convolutions without a bias are not served")
    if fields.values.get("time_step_limit") not in (None, *NO_LIMITS):
        raise fields.error("time_step_limit", "[0.0, Infinity]: time steps are not clamped")
