"""Launches Triton kernels with little host time; they may overlap (programmatic dependent launch).

At each launch Triton looks for the compiled kernel by all arguments, which takes the host longer
than the GPU takes for a step with prompts outside of graphs. A `Launcher` finds the compiled kernel
by a key. A kernel's arguments are first those of run time, which must not be specialised
(`do_not_specialize`; pointers are aligned to 16 bytes unless `do_not_specialize_on_alignment` names
them), then the constants. Tensors are passed as addresses, because for a tensor Triton would ask
the driver for its device. Triton's launch hooks are not called.

With programmatic dependent launch (Hopper and later) a kernel starts while the one before it ends:
`begin` lets the next one start, and waits until the one before has ended and its writes are
visible. Before `begin` a kernel may load only memory that no running kernel can write: weights,
uploads of the host, and the output of a kernel that called `wait` instead of `begin`, because no
kernel starts before that one has ended. Such a kernel must release what it wrote, and its readers
must bypass L1 (`.cg`), which may hold lines of an earlier step.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

_compile_only: ContextVar[set[Any] | None] = ContextVar("compile_only", default=None)
"""Inside `compile_only`: the (launcher, key) pairs that it has compiled."""


def power_of_2(value: int) -> int:
    """Return the least power of two that is at least `value`; 1 for 0. Blocks have such sizes."""
    return 1 << max(value - 1, 0).bit_length()


@functools.cache
def has_pdl() -> bool:
    return not INTERPRET and torch.cuda.get_device_capability()[0] >= 9


@functools.cache
def is_hopper() -> bool:
    return not INTERPRET and torch.cuda.get_device_capability()[0] == 9


@functools.cache
def shared_kib() -> int:
    """Return the most shared memory of a block in KiB: 227 on H100 and B200, 99 on RTX cards."""
    if INTERPRET:
        return 99
    device = torch.cuda.current_device()
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["max_shared_mem"]) >> 10


def compile_only(work: Callable[[], None]) -> None:
    """Compile, without running them, the kernels that `work` launches in this thread.

    Kernels that were compiled before do run. There is a compiling thread for each core, since
    Triton's compiler holds the interpreter's lock for only a tenth of its time. Returns when all
    are compiled. Raises the compiler's errors.
    """

    def compile_all() -> None:
        _compile_only.set(set())
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
            work()

    copy_context().run(compile_all)  # else Triton's mode would stay on after a compiler's error


class Launcher:
    """Mutable: a cache of compiled kernels."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        *,
        dtype: torch.dtype | tuple[torch.dtype | None, ...],
        num_warps: int,
        num_stages: int = 3,
    ) -> None:
        """Launch the kernel; compile it if this is the first launch of its kind.

        dtype: of the tensors whose dtype varies; a tuple if they differ, with None for an absent
        tensor. constants: without the last one, PDL, which is added here.
        """
        pdl = has_pdl()
        constants = (*constants, pdl)
        device = 0 if INTERPRET else torch.cuda.current_device()
        key = (device, dtype, num_warps, num_stages, *constants)
        compiled = self._compiled.get(key)
        if compiled is not None:
            stream = triton.runtime.driver.active.get_current_stream(device)
            addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *addresses, *constants,
            )  # fmt: skip
            return
        options: dict[str, Any] = {} if INTERPRET else {"launch_pdl": pdl}
        options.update(num_warps=num_warps, num_stages=num_stages)
        met = _compile_only.get()
        if met is not None:
            if (self, key) not in met:
                self._kernel.warmup(*args, *constants, grid=grid, **options)
                met.add((self, key))
            return
        start = time.perf_counter()
        compiled = self._kernel[grid](*args, *constants, **options)
        if compiled is not None:  # the interpreter has none
            self._compiled[key] = compiled
            seconds = time.perf_counter() - start
            logger.debug("%s for %s: %.3f s", self._kernel.__name__, key[1:], seconds)


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the end of the kernel before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the end of the kernel before. The next one starts only when this one has ended."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch_lines(address, inside):
    """Prefetch the 128 bytes at each address into the L2 cache, and do not wait for them.

    The bytes may change later: a load returns their value at that time. The interpreter does not
    support it.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.ne.s32 some, $2, 0;
        @some prefetch.global.L2 [$1];
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [address.to(tl.uint64, bitcast=True), inside.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
