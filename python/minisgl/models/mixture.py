"""Builds the mixtures of experts of a model; imported only for models that have one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from minisgl.layers.moe import MoELayer, SharedExpert
from minisgl.moe import create_moe_backend

if TYPE_CHECKING:
    from minisgl.layers import BuildContext
    from minisgl.models.spec import MoeSpec
    from minisgl.moe import BaseMoeBackend
    from minisgl.quantization import Weight


def mixture_builder(
    spec: MoeSpec, build: BuildContext, hidden_size: int
) -> Callable[[int], MoELayer]:
    """Returns a function from a layer's index to its mixture. The layers share their backends."""

    @cache
    def backend(kind: type[Weight]) -> BaseMoeBackend:
        return create_moe_backend(build.ops, build.dtype, kind)

    def mixture(index: int) -> MoELayer:
        shared = None
        if spec.shared_size:
            shared = SharedExpert(
                build,
                hidden_size=hidden_size,
                inner_size=spec.shared_size,
                prefix=f"model.layers.{index}.mlp",
            )
        return MoELayer(
            build,
            backend,
            hidden_size=hidden_size,
            inner_size=spec.inner_size,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            renormalise=spec.renormalise,
            names=spec.names(index),
            shared=shared,
        )

    return mixture
