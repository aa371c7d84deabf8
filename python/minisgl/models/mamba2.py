"""Mamba2 in the place of attention: what config.json and a spec say of it, and its layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from minisgl.layers.mamba2 import Mamba2
from minisgl.models.recurrent import INTERVAL, DeltaSpec

if TYPE_CHECKING:
    from minisgl.models.config import Fields, ModelConfig
    from minisgl.models.decoder import LayerBuild

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
    size of a state. value_dim: of a head. bias, out_bias: of the projections. norm: of each group,
    after the gate or before it."""

    bias: bool
    out_bias: bool
    norm: Literal["after", "before", None] = "after"


def letter_of(kind: object) -> str:
    """Returns the letter of an entry of `layers_block_type`; "?" for one that is not known."""
    return KINDS.get(kind, "?") if isinstance(kind, str) else "?"


NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""What `time_step_limit` is where time steps are not clamped, as transformers writes it."""


def mamba_sizes(config: ModelConfig) -> tuple[int, int, int, int]:
    """Returns Mamba2's heads, a head's size, groups, and the size of a state."""
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
    """Returns the layer's Mamba2. name: that of its module in the checkpoint."""
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
