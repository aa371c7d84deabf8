"""Which weights `--quantization` quantises: all linear layers except routers and `LEFT`.

If the CPU's kernels multiply the LM head, it becomes int8, whatever the other weights become: each
step reads it, and it is 26 % of Qwen3-0.6B's bytes. A tied embedding is the same table. On other
devices the head stays plain. So does an embedding that is not tied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from torch import Tensor

from minisgl.quantization.config import grouped_format, scaled_format
from minisgl.quantization.online import GROUP, UNITS, Kind, OnlineInt4, OnlineScaled
from minisgl.quantization.packed import PackedWeight, rows_of_share
from minisgl.quantization.rules import ROUTERS
from minisgl.quantization.weight import (
    PLAIN,
    Format,
    Formats,
    PlainWeight,
    Target,
    Weight,
    WeightBuild,
)

if TYPE_CHECKING:
    from minisgl.kernel.cpu import CpuOps

LEFT: Final = re.compile(r"\.(in_proj_(a|b|ba)|kv_b_proj)$")
"""Projections of recurrent layers with few rows (how fast the state fades and what it takes up),
and those of latents, which are used as tensors (`minisgl.layers.latent`)."""
HEAD: Final = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFormats(Formats):
    format: Format

    @classmethod
    def of_kind(cls, kind: Kind) -> OnlineFormats:
        if kind == "int4":
            name = grouped_format("gptq", 4, GROUP, has_zero=False, act_order=False).name
        else:
            name = scaled_format(kind, UNITS[kind]).name
        return cls(format=Format(name=name, weight=Online(kind=kind)))

    @property
    def names(self) -> Sequence[str]:
        return (self.format.name,)

    def of(self, modules: Sequence[str], target: Target) -> Format:
        if target == "Embedding" or any(module.endswith(HEAD) for module in modules):
            return TABLE
        if any(ROUTERS.search(module) or LEFT.search(module) for module in modules):
            return PLAIN
        return self.format


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """Makes the weights of a kind."""

    kind: Kind

    def __call__(self, build: WeightBuild) -> Weight:
        return OnlineInt4(build) if self.kind == "int4" else OnlineScaled(build, self.kind)


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
    from minisgl.kernel.panels import takes

    is_head = HEAD in part.name or HEAD in (part.alias or "")
    held = len(part.share) if build.rows is None else build.rows
    if is_head and takes(held, part.shape[1], 0, build.dtype, "int8"):
        return IntTable(build, "int8")
    return PackedWeight(build)


TABLE = Format(weight=table)
