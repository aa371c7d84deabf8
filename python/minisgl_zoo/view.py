"""A view of a checkpoint: it shows the files' tensors as the layers declare them.

The files may differ in three ways: they may have one tensor for several projections, heads whose
entries have another order, or a text model inside a larger model. The view converts each tensor
while it is read, so layers need not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from minisgl.errors import ConfigError
from minisgl.models.config import ModelConfig
from minisgl.models.loading.weight import Checkpoint
from minisgl.models.spec import Family
from minisgl.quantization import Part
from minisgl.utils.logger import get_logger
from minisgl_zoo.wrapper import model_name, part_of, text_name

logger = get_logger(__name__)


Cut = tuple[int, range]
"""The axis along which a tensor is cut, and the range of entries that is kept."""
OUTPUTS = {
    **dict.fromkeys(("weight", "bias", "weight_packed", "weight_zero_point"), 0),
    **dict.fromkeys(("weight_scale", "weight_scale_inv"), 0),
    **dict.fromkeys(("qweight", "scales", "qzeros"), 1),
}
"""The end of a tensor's name -> its axis of the layer's outputs. The first line has the names in
plain files and compressed-tensors, the second those of scales, the third those in GPTQ and AWQ. A
tensor with another name has no axis of outputs."""


Reorder = Callable[[str, Tensor, "CheckpointView"], Tensor]
"""From a declared name, its tensor and the view to the tensor that the layer gets."""


class CheckpointView(Checkpoint):
    """A `Checkpoint` whose `names`, and the names in all arguments, are those that layers
    declare."""

    def __init__(
        self,
        folder: Path,
        rename: Callable[[str], str | None],
        files: Mapping[str, Any] | None = None,
    ) -> None:
        """rename: a name in the files -> the declared name, or None for a tensor to skip. files:
        see `Checkpoint`."""
        super().__init__(folder, files)
        # Declared name -> (name in the files, the part of that tensor; None is all).
        self._places: dict[str, tuple[str, Cut | None]] = {}
        for name in self.names:
            if declared := rename(f"model.{name}" if self.is_bare else name):
                self._places[declared] = (name, None)
        if skipped := self.names - {name for name, _ in self._places.values()}:
            logger.info(
                "%s: the decoder is the text model; skipped %d tensors of %s",
                folder,
                len(skipped),
                " and ".join(sorted({part_of(name) for name in skipped})),
            )
        self._reorder: Reorder | None = None
        self.names = set(self._places)

    def split(self, fused: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> CheckpointView:
        """Show each linear layer called `fused` as layers called `names`, with `sizes` outputs.

        An unquantised layer with another number of outputs stays whole. Raises ConfigError if a
        number that stands for several outputs would belong to two layers.
        """
        total = sum(sizes)
        for whole in [name for name in self.names if f".{fused}." in name]:
            suffix, shape = whole.rpartition(".")[2], self.shape(whole)
            axis = OUTPUTS.get(suffix)
            if suffix in ("weight", "bias") and shape[0] != total:
                continue
            file_name, _ = self._places.pop(whole)
            first = 0
            for name, size in zip(names, sizes, strict=True):
                cut = None  # all of it, for each
                if axis is not None and math.prod(shape) > 1:
                    each = total // shape[axis]  # outputs that an entry is for
                    if each * shape[axis] != total or each & (each - 1) or size % each:
                        raise ConfigError(
                            f"{self.folder}: {whole} {list(shape)} cannot be cut into layers of "
                            f"{', '.join(map(str, sizes))} outputs, since one entry is for outputs "
                            "of two layers; use an unquantised checkpoint, with --quantization if "
                            "need be"
                        )
                    cut = axis, range(first // each, (first + size) // each)
                self._places[whole.replace(fused, name)] = (file_name, cut)
                first += size
        self.names = set(self._places)
        return self

    def renamed(self, names: Mapping[str, str]) -> CheckpointView:
        """Show tensors under other names. names: parts of names -> their replacements, applied one
        after another."""
        places = {}
        for name, place in self._places.items():
            for part, new in names.items():
                name = name.replace(part, new)
            places[name] = place
        self._places, self.names = places, set(places)
        return self

    def need(self, prefix: str, what: str) -> None:
        """Raise ConfigError, which names the option `what`, if no tensor is below a module."""
        if not any(name.startswith(prefix) for name in self.names):
            raise ConfigError(
                f"{self.folder}: {what} needs the tensors {prefix}*, and the files have none: "
                "quantised and converted checkpoints often leave them out; use the original one, "
                f"or leave {what.split()[-1]} out"
            )

    def drop(self, prefix: str) -> None:
        """Leave out the tensors of a module that is not served."""
        skipped = {name for name in self.names if name.startswith(prefix)}
        if skipped:
            logger.info("%s: skipped %d tensors of %s*", self.folder, len(skipped), prefix)
        for name in skipped:
            del self._places[name]
        self.names = set(self._places)

    def reordered(self, reorder: Reorder) -> CheckpointView:
        """Pass each tensor through `reorder` when it is read."""
        self._reorder = reorder
        return self

    def source(self, name: str) -> str:
        return self._places[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        file_name, cut = self._places[name]
        shape = super().shape(file_name)
        if cut is None:
            return shape
        return (*shape[: cut[0]], len(cut[1]), *shape[cut[0] + 1 :])

    def dtype(self, name: str) -> str:
        return super().dtype(self._places[name][0])

    def share(self, name: str, part: Part) -> Tensor:
        file_name, cut = self._places[name]
        if cut is not None:
            axis, first = cut[0], cut[1].start
            assert part.axis == axis, f"{name} is shared along {part.axis} and cut along {axis}"
            share = range(first + part.share.start, first + part.share.stop)
            part = replace(part, share=share)
        if part.stack and name == part.stack.name:
            part = replace(part, stack=replace(part.stack, name=file_name))
        tensor = super().share(file_name, part)
        return self._reorder(name, tensor, self) if self._reorder else tensor


def open_view(
    folder: Path, config: ModelConfig, family: Family, files: Mapping[str, Any] | None = None
) -> CheckpointView:
    """Return the view that the model of `config` needs. files: see `Checkpoint`."""
    view = CheckpointView(folder, model_name if config.mtp else text_name, files)
    view = family.view(view, config) if family.view else view
    return view.renamed(family.names)


def fused(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Split the files' fused linear layers: qkv_proj into q, k and v, gate_up_proj into gate and
    up."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    view.split("qkv_proj", ("q_proj", "k_proj", "v_proj"), (q_rows, kv_rows, kv_rows))
    return view.split("gate_up_proj", ("gate_proj", "up_proj"), (config.intermediate_size,) * 2)
