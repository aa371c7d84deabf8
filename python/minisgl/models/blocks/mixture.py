"""Mixtures of experts in config.json and in a spec, and the construction of their layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from minisgl.layers.moe import ExpertNames, MoELayer, SharedExpert
from minisgl.moe import ClampedGate, SquaredRelu, create_moe_backend
from minisgl.utils.text import counted

if TYPE_CHECKING:
    from minisgl.kernel.ops import Activation
    from minisgl.layers import BuildContext
    from minisgl.models.config import ModelConfig
    from minisgl.moe import BaseMoeBackend
    from minisgl.quantization import Weight

MAX_EXPERTS = 8192
"""A larger number is refused as a typo, because it would take long to build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts in some layers.

    is_sparse: for each layer whether it has the mixture; other layers have an MLP of
    `ModelConfig.intermediate_size`. inner_size: an expert's intermediate size. shared_size: the
    intermediate size of the shared expert, which every token takes; 0 for none. renormalise: see
    `Ops.route`. names: layer index -> the names of the experts' tensors. prefix: layer index -> the
    prefix of the shared expert's names. bias: whether router and experts have biases. layer,
    shared: the classes of the mixture and of the shared expert.
    """

    num_experts: int
    top_k: int
    inner_size: int
    renormalise: bool
    is_sparse: tuple[bool, ...]
    names: Callable[[int], ExpertNames]
    shared_size: int = 0
    prefix: Callable[[int], str] = "model.layers.{}.mlp".format
    activation: Activation | ClampedGate | SquaredRelu = "silu"
    bias: bool = False
    layer: Callable[..., MoELayer] = MoELayer
    shared: type[SharedExpert] = SharedExpert


def read_experts(
    config: ModelConfig, field: str, activation: Activation = "silu"
) -> tuple[int, int]:
    """Return (number of experts, number of experts that a token takes). Raises ConfigError.

    field: config.json's name of the number of experts. activation: the only one that the family's
    experts may have.
    """
    fields = config.fields
    num_experts, top_k = fields.integer(field), fields.integer("num_experts_per_tok")
    if num_experts > MAX_EXPERTS:
        raise fields.error(field, f"at most {MAX_EXPERTS}")
    if top_k > num_experts:
        most = counted(num_experts, "expert")
        raise fields.error("num_experts_per_tok", f"at most the {most}")
    if config.activation != activation:
        raise fields.error("hidden_act", f"{activation} in a mixture of experts")
    return num_experts, top_k


def expert_names(
    prefix: str,
    *,
    router: str = "gate",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertNames:
    """Return the names of a mixture's tensors below `prefix`. projections: the names of an expert's
    gate, up and down."""
    experts = f"{prefix}.experts"
    gate, up, down = (f"{experts}.{{}}.{name}.weight" for name in projections)
    return ExpertNames(
        router=f"{prefix}.{router}.weight",
        router_alias=None,
        gate=gate,
        up=up,
        down=down,
        all_gate_up=f"{experts}.gate_up_proj",
        all_down=f"{experts}.down_proj",
    )


def names_in_mlp(layer: int) -> ExpertNames:
    """Return the names of most families' mixtures: `gate` and `experts` below `mlp`."""
    return expert_names(f"model.layers.{layer}.mlp")


def mixture_in_each_layer(
    config: ModelConfig, names: Callable[[int], ExpertNames], **more: Any
) -> MoeSpec:
    """Return a mixture of `num_local_experts` in each layer. Each expert has the intermediate size
    of config.json, and a token's weights sum to 1. more: further fields of `MoeSpec`."""
    num_experts, top_k = read_experts(config, "num_local_experts")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=config.intermediate_size,
        renormalise=True,
        is_sparse=(True,) * config.num_layers,
        names=names,
        **more,
    )


def mixture_builder(
    spec: MoeSpec, build: BuildContext, hidden_size: int
) -> Callable[[int], MoELayer]:
    """Return a function from a layer's index to its mixture. All mixtures use the same backends."""

    @cache
    def backend(kind: type[Weight]) -> BaseMoeBackend:
        return create_moe_backend(build.ops, build.dtype, kind)

    def mixture(index: int) -> MoELayer:
        shared = None
        if spec.shared_size:
            shared = spec.shared(
                build,
                hidden_size=hidden_size,
                inner_size=spec.shared_size,
                prefix=spec.prefix(index),
            )
        return spec.layer(
            build,
            backend,
            hidden_size=hidden_size,
            inner_size=spec.inner_size,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            renormalise=spec.renormalise,
            names=spec.names(index),
            shared=shared,
            activation=spec.activation,
            bias=spec.bias,
        )

    return mixture
