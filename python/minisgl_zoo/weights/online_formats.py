"""Which weights `--quantization` quantises: all linear layers except routers and `LEFT`. With int4,
sensitive ones become int8.

If the CPU's kernels multiply the LM head, it becomes int8, whatever the other weights become: each
step reads it, and it is 26 % of Qwen3-0.6B's bytes. A tied embedding is the same table. On other
devices the head stays plain. So does an embedding that is not tied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from torch import Tensor

from minisgl.core.args import Quantization
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.ops import rows_of_share
from minisgl.quantization.packed import PackedWeight
from minisgl.quantization.parameter import TensorOwner
from minisgl.quantization.weight import (
    PLAIN,
    Format,
    Formats,
    PlainWeight,
    Target,
    Weight,
    WeightBuild,
)
from minisgl.utils.arch import cpu_flags
from minisgl.utils.logger import get_logger
from minisgl_zoo.weights.methods import scaled_format
from minisgl_zoo.weights.online import UNITS, Kind, Loss, OnlineScaled
from minisgl_zoo.weights.online_int4 import OnlineInt4
from minisgl_zoo.weights.panels import takes
from minisgl_zoo.weights.quantised import QuantisedWeight, log_kernels
from minisgl_zoo.weights.rules import ROUTERS

LEFT: Final = re.compile(r"\.(in_proj_(a|b|ba)|kv_b_proj)$")
"""Projections of recurrent layers with few rows (how fast the state fades and what it takes up),
and those of latents, which are used as tensors (`minisgl_zoo.blocks.latent_attention`)."""
HEAD: Final = "lm_head"
ATTENTION: Final = re.compile(r"\.self_attn\.[a-z_]+$|\.mixer\.[qkvo]_proj$")
DOWN: Final = re.compile(r"\.layers\.(\d+)\.mlp\.down_proj$")

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFormats(Formats):
    """num_layers: of the model; None if it does not matter."""

    format: Format
    num_layers: int | None = None

    @classmethod
    def of_kind(cls, kind: Quantization, num_layers: int) -> OnlineFormats:
        if kind == "int4":
            return cls(format=INT4, num_layers=num_layers)
        return cls(format=_scaled(kind))

    @property
    def names(self) -> Sequence[str]:
        return (INT4.name, INT8.name) if self.format is INT4 else (self.format.name,)

    def of(self, modules: Sequence[str], target: Target) -> Format:
        if target == "Embedding" or any(module.endswith(HEAD) for module in modules):
            return TABLE
        if any(ROUTERS.search(module) or LEFT.search(module) for module in modules):
            return PLAIN
        if self.num_layers and any(is_sensitive(each, self.num_layers) for each in modules):
            return INT8
        return self.format

    def log(self, model: TensorOwner) -> None:
        log_kernels(model, self.names)
        log_loss(model)
        if self.format is INT4 and (advice := slow_int4_advice(model)):
            logger.info("%s", advice)


def is_sensitive(module: str, num_layers: int) -> bool:
    """Return whether int8 is worth its bytes: attention, which is a fifth to a third of the numbers
    and half of what int4 adds to the perplexity (docs/quantization.md has the table), and `down` of
    an MLP in the first and the last eighth of the layers and in each third one between, the layers
    that llama.cpp's Q4_K_M gives 6 bits."""
    if ATTENTION.search(module):
        return True
    found = DOWN.search(module)
    if not found:
        return False
    layer, eighth = int(found[1]), num_layers // 8
    return layer < eighth or layer >= num_layers - eighth or (layer - eighth) % 3 == 2


def log_loss(model: TensorOwner) -> None:
    """Log the error of all quantised weights together, and which has the largest."""
    losses = [
        node.loss
        for node in model.walk()
        if isinstance(node, OnlineInt4 | OnlineScaled) and node.loss.total
    ]
    if not losses:
        return  # random weights
    whole = Loss("")
    for loss in losses:
        whole.error, whole.total = whole.error + loss.error, whole.total + loss.total
        whole.seconds += loss.seconds
    worst = max(losses, key=lambda loss: loss.relative)
    logger.info(
        "quantised %d weights in %.1f s of one core: root mean square error %.4f of the weights', "
        "the largest %.4f (%s)",
        len(losses), whole.seconds, whole.relative, worst.relative, worst.name,
    )  # fmt: skip


def slow_int4_advice(model: TensorOwner) -> str | None:
    """Return a sentence if this CPU multiplies rows slower by int4 than by int8, else None."""
    flags = cpu_flags()
    is_on_cpu = any(isinstance(node, QuantisedWeight) and node.panels for node in model.walk())
    if not is_on_cpu or "avx2" not in flags or "avx512bw" in flags:
        return None
    return (
        "this CPU has no AVX-512, and then int4 computes slower than int8, but for one request's "
        "decode steps: --quantization int8 is faster with several requests and more exact"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """Makes the weights of a kind."""

    kind: Kind

    def __call__(self, build: WeightBuild) -> Weight:
        return OnlineScaled(build, self.kind)


def _scaled(kind: Kind) -> Format:
    return Format(name=scaled_format(kind, UNITS[kind]).name, weight=Online(kind=kind))


INT8: Final = _scaled("int8")
INT4: Final = Format(
    name="int4, a scale and a zero point for each group of inputs", weight=OnlineInt4
)


class IntTable(OnlineScaled):
    """An LM head in int8, whose rows may also be embeddings."""

    def rows(self, ids_T: Tensor, share: range | None = None) -> Tensor:
        assert self.panels, "the kernels do not read this table"
        return rows_of_share(partial(self.panels.rows, cast("CpuOps", self.ops)), ids_T, share)


def table(build: WeightBuild) -> Weight:
    """Return the weight of an LM head or of an embedding. A tied embedding's alias is the head's
    name."""
    (part,) = build.parts
    if not build.ops.packs(build.dtype):
        return PlainWeight(build)
    is_head = HEAD in part.name or HEAD in (part.alias or "")
    held = len(part.share) if build.rows is None else build.rows
    if is_head and takes(held, part.shape[1], 0, build.dtype, "int8"):
        return IntTable(build, "int8")
    return PackedWeight(build)


TABLE = Format(weight=table)


def online_formats(kind: Quantization, num_layers: int) -> OnlineFormats:
    """Return the formats of `--quantization`."""
    return OnlineFormats.of_kind(kind, num_layers)
