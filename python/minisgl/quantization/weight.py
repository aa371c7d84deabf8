"""A weight: a matrix in some storage format that knows how to multiply.

Layers, the loader and the ops ask a `Weight` and never its format. A format is one subclass: it
declares the checkpoint tensors of its matrices, with this rank's share of each, and writes `dense`.
That is enough to compute. It overrides `linear` where a kernel reads the format, and packs its
tensors in `init_buffers` where the kernel wants another layout.

Axes: O outputs, I inputs, L matrices of a stack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from torch import Tensor

from minisgl.quantization.parameter import Part, TensorOwner

if TYPE_CHECKING:
    import torch

    from minisgl.kernel.ops import Activation, Ops

Target = Literal["Linear", "Embedding"]
"""The class of a module in PyTorch. Checkpoints name it to say which modules are quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBuild:
    """The argument of a weight's constructor.

    dtype: of the activations. parts: the checkpoint matrices with the names and shapes [O, I] that
    they have in a plain checkpoint. rows, stacked: see `TensorOwner.declare`.
    """

    ops: Ops
    dtype: torch.dtype
    parts: Sequence[Part]
    rows: int | None = None
    stacked: int | None = None


class Weight(TensorOwner, ABC):
    """A matrix [O, I], perhaps of several checkpoint matrices merged along O; or a stack [L, O,
    I].

    moe_backend: the row of table `moe` (`minisgl.plugins`) for experts in this format on a GPU.
    """

    moe_backend: ClassVar[str] = "packed"

    def __init__(self, build: WeightBuild) -> None:
        super().__init__()
        self.ops, self.dtype = build.ops, build.dtype

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the matrix or the stack as a tensor of `dtype`."""

    def linear(
        self, x: Tensor, bias: Tensor | None = None, gate: Activation | None = None
    ) -> Tensor:
        """See `Ops.linear`."""
        return self.ops.linear(x, self.dense(), bias, gate)

    def logits(self, x_SD: Tensor) -> Tensor:
        """See `Ops.logits`."""
        return self.ops.logits(x_SD, self.dense())

    def gates_input(self, num_rows: int) -> bool:
        """Return whether an MLP's gate is applied faster to this weight's input (`gated_linear`)
        than to the output of the GEMM before."""
        return False

    def gated_linear(self, x: Tensor, gate: Activation, bias: Tensor | None = None) -> Tensor:
        """Return `linear` of a gated input (`Ops.gated`)."""
        return self.linear(self.ops.gated(x, gate), bias)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float,
        bias: Tensor | None, gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `Ops.norm_linear`. A subclass overrides it if its kernels compute norms, too."""
        x, residual = self.ops.normed(x, residual, norm_weight, eps)
        return self.linear(x, bias, gate), residual

    def rows(self, ids_T: Tensor, share: range | None = None) -> Tensor:
        """See `Ops.embed`; with a `share`, `Ops.embed_share`."""
        if share is None:
            return self.ops.embed(ids_T, self.dense())
        return self.ops.embed_share(ids_T, self.dense(), share)

    def __getitem__(self, index: int) -> Self:
        """Return matrix `index` of a stack, as a view."""
        matrix = object.__new__(type(self))
        matrix.__dict__.update(self.__dict__)
        for declared in self._declared:
            attr = declared.keywords["attr"]
            setattr(matrix, attr, getattr(self, attr)[index])
        return matrix


class PlainWeight(Weight):
    """Numbers of the activations' dtype."""

    tensor: Tensor

    def __init__(self, build: WeightBuild) -> None:
        super().__init__(build)
        self.declare("tensor", build.dtype, *build.parts, rows=build.rows, stacked=build.stacked)

    @classmethod
    def of(cls, ops: Ops, tensor: Tensor) -> PlainWeight:
        """Return the weight of a tensor in memory."""
        parts = [Part.whole("weight", *tensor.shape)]
        weight = cls(WeightBuild(ops=ops, dtype=tensor.dtype, parts=parts))
        weight.tensor = tensor
        return weight

    def dense(self) -> Tensor:
        return self.tensor

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float,
        bias: Tensor | None, gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self.ops.norm_linear(x, residual, norm_weight, eps, self.tensor, bias, gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a checkpoint stores a matrix.

    weight: makes a weight; raises ConfigError if the format cannot be cut at a rank's share. unit:
    a rank's share begins and ends at a multiple of this. name: for the log; "" for plain numbers.
    """

    weight: Callable[[WeightBuild], Weight]
    unit: int = 1
    name: str = ""


PLAIN = Format(weight=PlainWeight)


class Formats:
    """Maps each module of a checkpoint to its format. This base class is for plain checkpoints.

    depends_on_kernels: whether the installed kernels decide in which formats weights are held.
    """

    depends_on_kernels: ClassVar[bool] = False

    @property
    def names(self) -> Sequence[str]:
        """The names of the quantised formats."""
        return ()

    def log(self, model: TensorOwner) -> None:
        """Log how the loaded model's quantised weights are multiplied. Plain ones are no news."""

    def of_files(self, names: Collection[str]) -> Formats:
        """Return the formats for a checkpoint whose tensors have these names."""
        return self

    def of(self, modules: Sequence[str], target: Target) -> Format:
        """Return the format of `modules`, which are of class `target` and are multiplied as one
        matrix. Raises ConfigError if they have several formats."""
        return PLAIN


UNQUANTISED = Formats()
