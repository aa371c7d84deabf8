"""The host side that our kernels in CUDA C++ share: skinny and grouped GEMMs, attention with heads
of 512 dims, and the delta rule, all on Hopper, and products by GGUF's weights. The kernels share
`csrc/hopper.cuh`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from minisgl.kernel.jit import CUDA, build_in_thread, load_library
from minisgl.kernel.once import JitUnavailable
from minisgl.utils.logger import get_logger
from minisgl_kernels import CSRC
from minisgl_kernels.cubin import load_cubin

logger = get_logger(__name__)

Kind = TypeVar("Kind", bound=Hashable)
Gemms = TypeVar("Gemms")

INPUTS = 64  # of a turn, and of a box of the bulk copy engine
SHARED_BYTES = 227 << 10  # that a block can have
TYPES = (torch.bfloat16, torch.float16)


def multiply_source(
    columns: int,
    kind: str,
    *,
    from_registers: bool = False,
    name: str = "multiply",
    transposed: bool = False,
) -> str:
    """Return the source of `name`, the matrix instruction with `columns` columns, which has an
    operand for each of a thread's sums. It adds to them, or replaces them if `add` is 0.

    kind: bf16, f16 or e4m3, of both matrices. from_registers: the left matrix is in registers; else
    both are in shared memory. transposed: the right matrix has a row for each input, not for each
    column.
    """
    count, is_fp8 = columns // 2, kind == "e4m3"
    names = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    if from_registers:
        matrix, forms = "const unsigned (&a)[4]", f", {int(transposed)}"
        words = ", ".join(f"%{count + i}" for i in range(4))
        left, inputs = f"{{{words}}}", "".join(f'"r"(a[{i}]), ' for i in range(4))
    else:
        matrix, forms = "unsigned long long a", "" if is_fp8 else f", 0, {int(transposed)}"
        left, inputs = f"%{count}", '"l"(a), '
    right = count + inputs.count(",")
    return (
        f"__device__ void {name}(float (&sums)[{count}], {matrix}, unsigned long long b,\n"
        "                         int add = 1) {\n"
        f'  asm volatile("{{ .reg .pred add; setp.ne.b32 add, %{right + 1}, 0;\\n"\n'
        f'      "wgmma.mma_async.sync.aligned.m64n{columns}k{32 if is_fp8 else 16}"\n'
        f'      ".f32.{kind}.{kind} {{{names}}}, "\n'
        f'      "{left}, %{right}, add, 1, 1{forms}; }}"\n'
        f'      : {operands} : {inputs}"l"(b), "r"(add));\n}}\n'
    )


def load_gemm(
    name: str,
    dtype: torch.dtype,
    columns: Iterable[int],
    numbers: Mapping[str, int],
    headers: Iterable[str] = (),
    *,
    from_registers: bool = False,
    is_fp8: bool = False,
) -> bytes:
    """Return the cubin of `csrc/NAME.cu` with matrix instructions of these columns.

    dtype: of activations and outputs. headers: its files behind hopper.cuh. is_fp8: both matrices
    are fp8. Raises JitUnavailable.
    """
    defines = [f"{key}={int(value)}" for key, value in numbers.items()]
    defines.append(f"BFLOAT16={int(dtype == torch.bfloat16)}")
    kind = "e4m3" if is_fp8 else "bf16" if dtype == torch.bfloat16 else "f16"
    multiplies = "".join(multiply_source(n, kind, from_registers=from_registers) for n in columns)
    return load_cubin(CSRC, name, "sm_90a", defines, ("hopper.cuh", *headers), multiplies)


class Kernels(Generic[Kind]):
    """The kernels of one source on the current device, each for a kind of task, and the tensor maps
    with which the bulk copy engine finds weights and pools. Mutable: caches of both."""

    _shared_bytes = SHARED_BYTES
    _overlaps = True

    def __init__(
        self,
        name: str,
        cubin: Callable[[Kind], bytes],
        otherwise: str,
        *,
        prefer_shared: bool = False,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        """name: the kernel's. otherwise: for the log, what is used if one cannot be made.
        prefer_shared: all of a multiprocessor's memory is shared memory, so that a block of the
        next kernel fits beside one of this. shared_bytes: the most that a block takes.

        Raises JitUnavailable where nothing can be compiled, RuntimeError without a device.
        """
        torch.zeros(1, device="cuda")  # makes the context that the driver's calls need
        self.library = load_library(CUDA)
        self.num_cores = int(torch.cuda.get_device_properties().multi_processor_count)
        self._name, self._cubin, self._otherwise = name, cubin, otherwise
        self._prefer_shared, self._shared_bytes = prefer_shared, shared_bytes
        self._overlaps = torch.cuda.get_device_capability()[0] >= 9
        self._made: dict[Kind, int | None] = {}
        self._begun: set[Kind] = set()
        self._weight_maps: dict[tuple[int, ...], bytes] = {}

    def begin_compiling(self, kind: Kind) -> None:
        """Compile a kernel in the background, once, unless it is cached."""
        if kind not in self._begun:
            self._begun.add(kind)
            build_in_thread(lambda: self._cubin(kind))

    def make(self, kind: Kind) -> int:
        """Compile and load a kernel. Raises JitUnavailable and RuntimeError."""
        module = self.library.cubin_load(self._cubin(kind))
        kernel: int = self.library.cubin_kernel(module, self._name)
        self.library.kernel_allow(kernel, self._shared_bytes)
        if self._prefer_shared:
            self.library.kernel_prefer_shared(kernel)
        return kernel

    def get(self, kind: Kind) -> int | None:
        """Return the kernel, or None if it cannot be made: a full disk must not end a step."""
        if kind not in self._made:
            try:
                self._made[kind] = self.make(kind)
            except (JitUnavailable, RuntimeError) as error:
                logger.warning("%s: %s", self._otherwise, error)
                self._made[kind] = None
        return self._made[kind]

    def get_all(self, kinds: Sequence[Kind]) -> bool:
        """Return whether all these kernels can be made. Those that are not cached are compiled at
        the same time."""
        for kind in kinds[1:]:
            if kind not in self._made:
                self.begin_compiling(kind)
        return all(self.get(kind) is not None for kind in kinds)

    def launch(
        self, kernel: int | None, num_blocks: int, num_threads: int, shared_bytes: int,
        *addresses: int, cluster: int = 1,
    ) -> None:  # fmt: skip
        """Launch a kernel that `get` has returned. addresses: of its arguments, on the host.
        cluster: blocks that access each other's shared memory."""
        parameters = (ctypes.c_int64 * len(addresses))(*addresses)
        self.library.kernel_launch(
            kernel, num_blocks, num_threads, shared_bytes, cluster, ctypes.addressof(parameters),
            self._overlaps, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def weight_map(
        self, address: int, rows: int, columns: int, box: int, itemsize: int = 2,
        box_columns: int = INPUTS,
    ) -> bytes:  # fmt: skip
        """Return the tensor map of [rows, columns] at an address, of numbers of 1, 2 or 8 bytes. A
        copy takes `box` rows."""
        key = (address, rows, columns, box, itemsize, box_columns)
        if key not in self._weight_maps:
            self._weight_maps[key] = bytes(self.library.tensor_map(*key))
        return self._weight_maps[key]


def on_hopper(make: Callable[[], Gemms], otherwise: str) -> Gemms | None:
    """Return the result of `make`, or None if this is no Hopper GPU or nothing compiles.

    otherwise: for the log, what is used instead.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        return make()
    except (JitUnavailable, RuntimeError) as error:
        logger.info("%s: %s", otherwise, error)
        return None
