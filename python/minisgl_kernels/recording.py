"""Records calls of the C++ kernels and ops of torch, and replays them without the Python between
them.

That Python is a tenth of a decode step of a small model (README.md). A recording has calls with
their arguments, so each later step must have its inputs at the same addresses. Tensors that
`torch.empty` makes while recording are in blocks that all recordings use, since only one is
replayed at a time, and so are results of torch's ops. A step in which the host reads a tensor's
numbers, or in which they decide a shape, is not recorded. Collectives are not seen, so one rank
records.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tvm_ffi
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from minisgl.kernel.cpu import CpuOps

LEAST_BYTES = 64
READS_ON_HOST = {torch.ops.aten.resolve_conj.default}
"""The first op that `Tensor.numpy` and `Tensor.tolist` call."""
SHAPED_BY_NUMBERS = {torch.ops.aten.where.default, torch.ops.aten.nonzero_numpy.default}
"""Numbers decide the shapes of their results, and torch does not tag them so."""


@dataclass(frozen=True, slots=True)
class Recording:
    """output: the output of the recorded work, in its own memory. Each replay overwrites it."""

    calls: Sequence[tuple[Callable[..., object], Sequence[Any]]]
    output: Tensor

    def replay(self) -> Tensor:
        for function, args in self.calls:
            function(*args)
        return self.output


class Calls:
    """Calls the functions of a library (`minisgl.kernel.jit.load_library`) and can record the
    calls. Mutable: it has a recorder while it records, and the blocks. One thread records."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._blocks = _Blocks()
        self._recorder: _Recorder | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._library, name)

        def call(*args: Any) -> Any:
            if self._recorder:
                self._recorder.add(function, args)
            return function(*args)

        setattr(self, name, call)  # the next access finds it without this method
        return call

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        """Return `compute()` and its recording; None instead if it cannot be replayed.
        Requires inference mode: without it torch does not show when `Tensor.tolist` reads numbers.
        """
        assert torch.is_inference_mode_enabled(), "recording outside of inference mode"
        self._recorder = recorder = _Recorder(self._blocks)
        try:
            with recorder:
                output = compute()
        finally:
            self._recorder = None
        return output, Recording(recorder.calls, output) if recorder.is_fixed else None


def create_ops(library: Any) -> CpuOps:
    """Return ops whose calls can be recorded."""
    return CpuOps(Calls(library))


class _Blocks:
    """Memory that is lent to tensors. A block is free again when no tensor uses it."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by bytes
        self._by_address: dict[int, Tensor] = {}

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        size = 1 << (max(num_bytes, LEAST_BYTES) - 1).bit_length()
        free = self._free[size]
        if not free:
            free.append(torch.empty(size, dtype=torch.uint8))
        block = free.pop()
        self._by_address[block.data_ptr()] = block
        lent = block.numpy()[: num_bytes or dtype.itemsize]  # an array of the borrower's own
        weakref.finalize(lent, free.append, block).atexit = False
        tensor = torch.from_numpy(lent).view(dtype)
        return tensor.view(shape) if num_bytes else tensor[:0].view(shape)

    def unlent(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same memory, whose block can be lent again while it exists."""
        block = self._by_address.get(tensor.untyped_storage().data_ptr())
        if block is None:
            return tensor
        numbers = block.view(tensor.dtype)
        return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's, not annotated
    """is_fixed: all that was called can be called again, whatever the tensors' numbers."""

    def __init__(self, blocks: _Blocks) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's, not annotated
        self.calls: list[tuple[Callable[..., object], Sequence[Any]]] = []
        self.is_fixed = True
        self._blocks = blocks
        self._seen: dict[tuple[Any, ...], tvm_ffi.Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. Otherwise torch would import its compiler, which nothing here uses, and
        which takes 73 MB and some seconds."""
        return False

    def add(self, function: Callable[..., object], args: Sequence[Any]) -> None:
        kept = [self._kept(arg) if isinstance(arg, Tensor) else arg for arg in args]
        self.calls.append((function, kept))

    def _kept(self, tensor: Tensor) -> tvm_ffi.Tensor:
        """Return the tensor that the recording keeps, as the library takes it (torch's would be
        converted at each call): one object for all layers that use the same memory."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._seen:
            self._seen[key] = tvm_ffi.from_dlpack(self._blocks.unlent(tensor))
        return self._seen[key]

    def _lent(self, tensor: Tensor) -> Tensor:
        return self._blocks.lend(tensor.shape, tensor.dtype).copy_(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype"):
            return self._blocks.lend(args[0], kwargs["dtype"])
        result = func(*args, **kwargs)
        made, given = _storages(result), _storages((args, kwargs))
        if not made or _depends_on_numbers(func, args):
            self.is_fixed = False
        elif func._schema.is_mutable or not made <= given:  # else it is a view
            args, kwargs = tree_map_only(Tensor, self._blocks.unlent, (args, kwargs))
            again: Callable[..., object] = partial(func, **kwargs)
            if not func._schema.is_mutable:
                result = tree_map_only(Tensor, self._lent, result)
                again = partial(_replace, tree_map_only(Tensor, self._blocks.unlent, result), again)
            self.calls.append((again, args))
        return result


def _replace(results: Any, again: Callable[..., object], *args: Any) -> None:
    """Compute the results of an op again, where they are."""
    for result, new in zip(tree_leaves(results), tree_leaves(again(*args)), strict=True):
        result.copy_(new)


def _depends_on_numbers(func: Any, args: Any) -> bool:
    """Return whether the host reads numbers of tensors by this op, or they decide the shape of its
    result."""
    if func is torch.ops.aten.index.Tensor:
        masks = (torch.bool, torch.uint8)
        return any(isinstance(x, Tensor) and x.dtype in masks for x in args[1])
    known = func in READS_ON_HOST or func in SHAPED_BY_NUMBERS
    return known or torch.Tag.dynamic_output_shape in func.tags


def _storages(values: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_leaves(values) if isinstance(x, Tensor)}
