"""Weights of GGUF files: in bfloat16 they stay packed, on a CPU as panels (`BlockWeight`), on a GPU
as tiles (`TileWeight`). Others are dequantised.

Matrices that are merged may have different forms (`blocks.Form`): files give values more bits
than queries and keys. Then each run of matrices of one form is a GEMM that writes its own columns
of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.ops import Activation, Ops, rows_of_share
from minisgl.quantization.packed import PackedWeight
from minisgl.quantization.parameter import Part, TensorOwner
from minisgl.quantization.weight import PlainWeight, Weight, WeightBuild
from minisgl_zoo.gguf.blocks import DTYPES, FORMS, Field, Form
from minisgl_zoo.gguf.header import TYPE_OF
from minisgl_zoo.gguf.tile_weight import TileWeight, blocks_of, products_of
from minisgl_zoo.gguf.tiles import TILE_FORMS, TileForm
from minisgl_zoo.weights.panels import (
    Panels,
    pack_bytes,
    pack_nibbles,
    pack_rows,
    six_bits,
    takes,
    unpack_bytes,
    unpack_nibbles,
    unpack_rows,
)
from minisgl_zoo.weights.quantised import QuantisedWeight

MIDDLE: Final = 8
"""An int4 number is stored so much above its value, so that it has no sign."""
Forms: TypeAlias = Mapping[str, Form] | Mapping[str, TileForm]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTypes:
    """Makes the weights of a file. types: module -> llama.cpp's name of its matrix's format, for
    quantised matrices. reordered: modules whose columns are in another order than the file's."""

    types: Mapping[str, str]
    reordered: frozenset[str] = frozenset()

    def __call__(self, build: WeightBuild) -> Weight:
        if self.why_dequantised(build) is None:
            runs = list(self._runs(build.parts, _forms(build.ops)))
            if build.stacked is not None or len(runs) == 1:
                return self._packed(build)
            packed = [self._packed(replace(build, parts=run, rows=None)) for run in runs]
            return MergedWeight(build, packed)
        if build.stacked is None and build.ops.packs(build.dtype):
            return PackedWeight(build)
        return PlainWeight(build)

    def why_dequantised(self, build: WeightBuild) -> str | None:
        """Why the weight is dequantised, or None if it stays packed."""
        products, forms = products_of(build.ops), _forms(build.ops)
        if products is not None:
            why = products.why_not(build.dtype)
        elif not build.ops.packs(build.dtype):
            why = "only a CPU or a GPU multiplies packed weights, and only in bfloat16"
        else:
            why = None
        if why:
            return why
        for part in build.parts:
            kind = self.type_of(part)
            if kind is None:
                return "merged with a matrix that is not quantised"
            if kind not in forms:
                return f"{kind} has no packed form"
            if part.rearrange or self.module_of(part.module) in self.reordered:
                return "its columns are in another order"
            unit = forms[kind].unit
            if part.axis == 1 and (part.share.start % unit or part.share.stop % unit):
                return f"a rank's share cuts a block of {unit}"
            if part.shape[1] % unit:
                return f"no multiple of {unit} inputs"
        runs = list(self._runs(build.parts, forms))
        if build.stacked is not None and len(runs) > 1:
            return "experts of several forms"
        for run in runs:
            outputs = sum(len(part.share) if part.axis == 0 else part.shape[0] for part in run)
            outputs = build.rows if build.rows is not None else outputs // (build.stacked or 1)
            form = FORMS[self._kind(run[0])]
            if not takes(outputs, run[0].shape[1], form.group, build.dtype, form.kind):
                return "no multiple of 16 outputs"
        if build.stacked is not None and products is not None and not self._all_stay(build.parts):
            return "the experts' gate and up are dequantised"
        return None

    def _all_stay(self, parts: Sequence[Part]) -> bool:
        """Whether the other matrices of these experts stay packed, too, if `parts` are of one of
        them: a GPU's kernels read all, or gate and up."""
        modules = {self.module_of(part.module) for part in parts}
        prefix = min(modules).rpartition(".")[0]
        others = {
            TILE_FORMS.get(kind)
            for module, kind in self.types.items()
            if module.rpartition(".")[0] == prefix and module not in modules
        }
        return len(modules) > 1 or (len(others) == 1 and None not in others)

    def type_of(self, part: Part) -> str | None:
        """The name of the format of the part's matrix; None if it is not quantised."""
        return self.types.get(self.module_of(part.module))

    @staticmethod
    def module_of(name: str) -> str:
        """The module's name, without the number of an expert."""
        before, experts, after = name.partition(".experts.")
        return f"{before}{experts}{after.partition('.')[2]}" if experts else before

    def _runs(self, parts: Sequence[Part], forms: Forms) -> Iterator[list[Part]]:
        """Yield the runs of quantised parts that have one form."""
        for _, run in groupby(parts, key=lambda part: forms[self._kind(part)]):
            yield list(run)

    def _kind(self, part: Part) -> str:
        return self.types[self.module_of(part.module)]

    def _packed(self, build: WeightBuild) -> BlockWeight | TileWeight:
        kinds = [self._kind(part) for part in build.parts]
        return BlockWeight(build, kinds) if _forms(build.ops) is FORMS else TileWeight(build, kinds)


def _forms(ops: Ops) -> Forms:
    """The forms in which these ops multiply packed matrices."""
    return FORMS if products_of(ops) is None else TILE_FORMS


class BlockWeight(QuantisedWeight):
    """Matrices of one form."""

    packed: Tensor
    scale: Tensor
    factor: Tensor | None = None
    step: Tensor | None = None
    zero: Tensor | None = None

    def __init__(self, build: WeightBuild, kinds: Sequence[str]) -> None:
        """kinds: llama.cpp's name of each part's format."""
        super().__init__(build)
        self.form = FORMS[kinds[0]]
        for name in self.form.fields:
            held = [
                _field(part, kind, name, cast("CpuOps", build.ops))
                for part, kind in zip(build.parts, kinds, strict=True)
            ]
            self.declare(name, DTYPES[name], *held, rows=build.rows, stacked=build.stacked)
        self._inputs = self.form.block * self.scale.shape[-1]

    @property
    def outputs(self) -> int:
        """Rows of one matrix, as in the kernels' `Panels`."""
        return self.packed.shape[-2]

    def dense(self) -> Tensor:
        form, packed, (scale, factor, step, zero) = self.form, self.packed, self._entries()
        if self.panels and form.kind == "int4":
            packed = unpack_nibbles(packed, offset=MIDDLE)
        elif self.panels:
            packed = unpack_bytes(packed, form.kind)
        if form.kind == "int6":
            numbers = six_bits(packed).float()
        elif form.kind == "int4":
            numbers = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float()
            numbers = numbers if form.has_step else numbers - MIDDLE
        else:
            numbers = packed.view(torch.int8).float()
        assert scale is not None
        values = numbers * self._spread(scale, factor)
        if step is not None:
            values -= self._spread(step, zero)
        return values.to(self.dtype)

    def _entries(self) -> list[Tensor | None]:
        tensors = [self.scale, self.factor, self.step, self.zero]
        if not self.panels:
            return tensors
        return [None if tensor is None else unpack_rows(tensor) for tensor in tensors]

    def _spread(self, of_blocks: Tensor, of_groups: Tensor | None) -> Tensor:
        """[..., blocks] times [..., groups] -> [..., I]."""
        spread = of_blocks.float().repeat_interleave(self.form.block, -1)
        if of_groups is None:
            return spread
        return spread * of_groups.float().repeat_interleave(self.form.group, -1)

    def pack(self, ops: CpuOps) -> Panels:
        is_4_bit = self.form.kind == "int4"
        if is_4_bit:
            pack_nibbles(ops, self.packed, offset=MIDDLE)
        else:
            pack_bytes(ops, self.packed, self.form.kind)
        for tensor in (self.scale, self.factor, self.step, self.zero):
            if tensor is not None:
                pack_rows(ops, tensor)
        return Panels(
            kind=self.form.kind, numbers=self.packed, group=self.form.group, scales=self.scale,
            factors=self.factor, zeros=self.zero, steps=self.step,
            middle=MIDDLE if is_4_bit else 0, outputs=self.outputs, inputs=self._inputs,
        )  # fmt: skip

    def linear_into(self, x_MD: Tensor, bias: Tensor | None, out_MF: Tensor) -> None:
        """Do `linear` and write to `out`, whose rows may have gaps between them."""
        assert self.panels, "multiplied before it was packed"
        self.panels.linear_into(cast("CpuOps", self.ops), x_MD, bias, None, out_MF)

    def rows(self, ids_T: Tensor, share: range | None = None) -> Tensor:
        assert self.panels, "read before it was packed"
        return rows_of_share(partial(self.panels.rows, cast("CpuOps", self.ops)), ids_T, share)


class MergedWeight(Weight):
    """Merged matrices of several forms, one below the other."""

    def __init__(self, build: WeightBuild, runs: Sequence[BlockWeight | TileWeight]) -> None:
        super().__init__(build)
        self._runs = tuple(runs)

    def children(self) -> Iterator[TensorOwner]:
        return iter(self._runs)

    def dense(self) -> Tensor:
        return torch.cat([run.dense() for run in self._runs])

    def linear(
        self, x: Tensor, bias: Tensor | None = None, gate: Activation | None = None
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        outputs = sum(run.outputs for run in self._runs)
        out = torch.empty(len(rows), outputs, dtype=x.dtype, device=x.device)
        first = 0
        for run in self._runs:
            columns = slice(first, first + run.outputs)
            run.linear_into(rows, None if bias is None else bias[columns], out[:, columns])
            first += run.outputs
        y = out.view(*x.shape[:-1], outputs)
        return self.ops.gated(y, gate) if gate else y


def _field(part: Part, kind: str, name: Field, ops: CpuOps) -> Part:
    """The share of the part's blocks, of which loading keeps the field `name`."""
    return replace(
        blocks_of(part, kind),
        rearrange=partial(_room, kind=kind, name=name),
        fills=partial(_read, ops, list(FORMS).index(kind), list(DTYPES).index(name)),
    )


def _room(rows: Tensor, kind: str, name: Field) -> Tensor:
    """Return an empty tensor for a field of rows of blocks, uint8 [O, N * B]."""
    form = FORMS[kind]
    inputs = rows.shape[1] // TYPE_OF[kind].num_bytes * form.block
    return rows.new_empty((len(rows), form.width(name, inputs)), dtype=DTYPES[name])


def _read(ops: CpuOps, kind: int, field: int, rows: Tensor, made: Tensor) -> None:
    """Write a field of the rows to `made`."""
    ops.calls.read_blocks(rows, kind, field, made)
