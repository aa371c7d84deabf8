"""Mamba2 in the place of attention: its sizes in config.json and in a spec, and its layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from minisgl_zoo.layers.mamba2 import Mamba2
from minisgl_zoo.recurrent.spec import INTERVAL, DeltaSpec

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.decoder import Block, LayerBuild
    from minisgl.models.fields import Fields
    from minisgl.models.spec import LayerSpec

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


def mixer(at: LayerBuild, name: str) -> Mamba2:
    """Return the layer's Mamba2. name: the name of its module in the checkpoint."""
    spec, layer, mamba = at.spec, at.layer, at.layer.recurrent
    assert isinstance(mamba, MambaSpec)
    return Mamba2(
        at.build,
        prefix=f"{layer.prefix}.{name}",
        hidden_size=spec.config.hidden_size,
        num_heads=layer.num_heads,
        num_groups=layer.num_kv_heads,
        state_size=layer.head_dim,
        head_dim=mamba.value_dim,
        taps=mamba.taps,
        bias=mamba.bias,
        out_bias=mamba.out_bias,
        norm=mamba.norm,
        interval=INTERVAL,
        norm_eps=spec.config.norm_eps,
        place=at.place,
    )
