"""Which tensors that our layers declare a tensor of a GGUF file becomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.models.registry import spec_of
from minisgl_zoo.gguf.changes import ALL, change_of, parts_of
from minisgl_zoo.gguf.names import EXPERT_KINDS, GLOBAL_NAMES, names_of

if TYPE_CHECKING:
    from minisgl.layers.moe import ExpertNames
    from minisgl.models.config import ModelConfig
    from minisgl_zoo.gguf.tensors import Change


@dataclass(frozen=True, slots=True)
class Place:
    """A declared name, and the part of the file's tensor that it names. index: rows of the tensor,
    or an expert, or an expert and its rows. change: see `change_of`."""

    name: str
    index: int | slice | tuple[int, slice]
    change: Change | None = None


class Places:
    """The places of one model's tensors."""

    def __init__(self, arch: str, config: ModelConfig) -> None:
        self._arch, self._config = arch, config
        self._layer_names, self._routed = names_of(arch), _routed(config)

    def of(self, name: str, shape: Sequence[int]) -> Iterator[Place]:
        """Yield the places of a file's tensor. shape: its first axis has rows or experts."""
        layer, part = split_name(name)
        kind, _, suffix = part.rpartition(".") if "." in part else (part, "", "weight")
        names = self._routed.get(layer)
        if whole := self._layer_names.get(part):
            yield Place(layer + whole, ALL, change_of(self._arch, kind, self._config))
        elif names and kind in EXPERT_KINDS:
            pattern: str = getattr(names, EXPERT_KINDS[kind])
            for expert in range(shape[0]):
                yield Place(pattern.format(expert), expert)
        elif names and names.gate and kind == "ffn_gate_up_exps":
            half = shape[1] // 2
            for expert in range(shape[0]):
                yield Place(names.gate.format(expert), (expert, slice(half)))
                yield Place(names.up.format(expert), (expert, slice(half, None)))
        else:
            known = self._layer_names if layer else GLOBAL_NAMES
            if names:
                router = names.router.removeprefix(layer).removesuffix(".weight")
                known = {**known, "ffn_gate_inp": router, "exp_probs_b": router}
                suffix = "e_score_correction_bias" if kind == "exp_probs_b" else suffix
            for own, own_rows in parts_of(self._arch, kind, shape[0], self._config):
                change = change_of(self._arch, own, self._config)
                yield Place(f"{layer}{known.get(own, own)}.{suffix}", own_rows, change)


def _routed(config: ModelConfig) -> dict[str, ExpertNames]:
    """Return a layer's prefix -> the names of its router and experts."""
    moe = spec_of(config).moe
    if moe is None:
        return {}
    found = [moe.names(index) for index, sparse in enumerate(moe.is_sparse) if sparse]
    return {".".join(names.router.split(".", 3)[:3]) + ".": names for names in found}


def split_name(name: str) -> tuple[str, str]:
    """blk.3.attn_q.weight -> ("model.layers.3.", "attn_q.weight"); others -> ("", name)."""
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk":
        return f"model.layers.{parts[1]}.", parts[2]
    return "", name
