"""The formats of a GGUF file's matrices. `utils.gguf` writes them into config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from minisgl.models.config import ModelConfig
from minisgl.quantization.parameter import Part, TensorOwner
from minisgl.quantization.weight import PLAIN, Format, Formats, PlainWeight, Target, WeightBuild
from minisgl.utils.logger import get_logger
from minisgl_zoo.gguf.changes import reorders_columns
from minisgl_zoo.gguf.names import STACKED, Places, split_name
from minisgl_zoo.gguf.tile_weight import BLOCKS, TileWeight
from minisgl_zoo.gguf.weight import BlockWeight, FileTypes
from minisgl_zoo.weights.methods import MXFP4
from minisgl_zoo.weights.quantised import log_kernels

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFormats(Formats):
    """types: the formats of all matrices. has_mxfp4: whether they have experts of gpt-oss in
    MXFP4."""

    types: FileTypes
    has_mxfp4: bool

    depends_on_kernels: ClassVar[bool] = True

    @classmethod
    def read(cls, config: ModelConfig) -> GgufFormats:
        """Read the `quantization_config` in the config's fields."""
        section = config.fields.values["quantization_config"]
        arch, places = section["arch"], Places(section["arch"], config)
        types: dict[str, str] = {}
        reordered: set[str] = set()
        for name, kind in section["types"].items():
            for place in places.of(name, (1, 2)):  # all experts have one type
                module = FileTypes.module_of(place.name.removesuffix(".weight"))
                types[module] = kind
                if reorders_columns(arch, split_name(name)[1].removesuffix(".weight")):
                    reordered.add(module)
        return cls(
            types=FileTypes(types=types, reordered=frozenset(reordered)),
            has_mxfp4=has_mxfp4(section),
        )

    @property
    def names(self) -> Sequence[str]:
        return tuple(dict.fromkeys(self.types.types.values()))

    def of(self, modules: Sequence[str], target: Target) -> Format:
        if self.has_mxfp4 and any(".experts." in module for module in modules):
            return MXFP4
        parts = [Part.whole(f"{module}.weight", 1, 1) for module in modules]
        if not any(self.types.type_of(part) for part in parts):
            return PLAIN
        return Format(name="GGUF", weight=self.types)

    def log(self, model: TensorOwner) -> None:
        """Log which formats stay packed, and which are dequantised and why."""
        packed: dict[str, float] = {}
        dequantised: Counter[tuple[str, str]] = Counter()
        for parameter in model.parameters():
            owner, parts = parameter.owner, parameter.parts
            kinds = {self.types.type_of(part) or "" for part in _matrices(parts)}
            if isinstance(owner, BlockWeight | TileWeight):
                packed.update(dict.fromkeys(kinds, owner.form.bits_in_memory))
            elif isinstance(owner, PlainWeight) and any(kinds):
                stacked = parameter.shape[0] if len(parameter.shape) == 3 else None
                rows = parameter.shape[0] if len(parts) == 1 else None
                why = self.types.why_dequantised(
                    WeightBuild(
                        ops=owner.ops, dtype=owner.dtype, parts=parts, rows=rows, stacked=stacked
                    )
                )
                dequantised.update((kind, why or "") for kind in kinds if kind)
        if packed:
            bits = [f"{kind} in {each:.2f} bits a weight" for kind, each in packed.items()]
            logger.info("the file's weights stay packed: %s", ", ".join(bits))
        for (kind, why), count in dequantised.items():
            logger.info("%d weights in %s are dequantised: %s", count, kind, why)
        if self.has_mxfp4:
            log_kernels(model, [MXFP4.name])


def _matrices(parts: Sequence[Part]) -> list[Part]:
    """Return the parts under the names of their matrices."""
    return [replace(part, name=part.name.removesuffix(BLOCKS)) for part in parts]


def has_mxfp4(section: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` of `utils.gguf` has experts of gpt-oss in MXFP4."""
    types = section["types"]
    return section["arch"] in STACKED and types.get("blk.0.ffn_gate_exps.weight") == "MXFP4"
