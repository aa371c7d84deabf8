"""Records calls of the C++ kernels, and replays them without the Python between them.

That Python is a tenth of a decode step of a small model (README.md). A recording has calls with
their arguments, so each later step must have its inputs at the same addresses. Tensors that
`torch.empty` makes while recording are in blocks that all recordings use, since only one is
replayed at a time. Of torch's ops a tensor times a number can be replayed, because decoders scale
their embeddings so; a step with others that compute is not recorded.
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
from torch.utils._pytree import tree_leaves

from minisgl.kernel.cpu import CpuOps

LEAST_BYTES = 64
READS_ON_HOST = {torch.ops.aten.resolve_conj.default}
"""The first op that `Tensor.numpy` and `Tensor.tolist` call."""


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
        """Return `compute()` and its recording; None instead if it has ops that cannot be replayed.
        Requires inference mode: without it torch does not show when `Tensor.tolist` reads numbers.
        """
        assert torch.is_inference_mode_enabled(), "recording outside of inference mode"
        self._recorder = recorder = _Recorder(self._blocks)
        try:
            with recorder:
                output = compute()
        finally:
            self._recorder = None
        return output, None if recorder.computes else Recording(recorder.calls, output)


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
    """computes: whether there was an op that cannot be replayed."""

    def __init__(self, blocks: _Blocks) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's, not annotated
        self.calls: list[tuple[Callable[..., object], Sequence[Any]]] = []
        self.computes = False
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

    def _scaled(self, x: Tensor, factor: float) -> Tensor:
        scaled = self._blocks.lend(x.shape, x.dtype)
        kept, out = self._blocks.unlent(x), self._blocks.unlent(scaled)
        self.calls.append((partial(torch.mul, out=out), (kept, factor)))
        return torch.mul(x, factor, out=scaled)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype"):
            return self._blocks.lend(args[0], kwargs["dtype"])
        is_scaling = func is torch.ops.aten.mul.Tensor and isinstance(args[1], float)
        if is_scaling and args[0].is_floating_point() and args[0].is_contiguous():
            return self._scaled(*args)
        result = func(*args, **kwargs)
        made, given = _storages(result), _storages((args, kwargs))
        is_view = made and made <= given and not func._schema.is_mutable
        self.computes |= not is_view or func in READS_ON_HOST
        return result


def _storages(values: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_leaves(values) if isinstance(x, Tensor)}
