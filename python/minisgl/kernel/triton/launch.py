"""A short way to launch Triton kernels, and programmatic dependent launch between them.

Triton finds the compiled form of a kernel anew at each launch, from all arguments. A step with
prompts that no graph replays took the host 28 ms so in a model of 28 layers, longer than the GPU;
with a `Launcher`, which finds the compiled form by a key, it takes 10. So a launcher's kernels take
run-time arguments first, which must not be specialised (`do_not_specialize`; pointers
aligned to 16 bytes unless said otherwise), then the constants. Tensors are handed on as addresses:
of a tensor Triton would ask the driver where it lies. Triton's launch hooks are not called.

With programmatic dependent launch (Hopper and later) a kernel starts while the one before it ends:
`begin` lets the next one start and waits until the one before is complete, memory included. Before
it a kernel may load only what no kernel that still runs can write: weights, and what the host
uploaded; and what was written by a kernel that called `wait` instead of `begin`, as that lets none
start before it has ended. Such a kernel must release what it wrote, and who reads that must bypass
L1 (`.cg`), where lines of an earlier step may be.
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
"""Within `compile_only`: what it has met."""


@functools.cache
def has_pdl() -> bool:
    return not INTERPRET and torch.cuda.get_device_capability()[0] >= 9


@functools.cache
def shared_kib() -> int:
    """Return the shared memory that a block may have: 227 on H100 and B200, 99 on RTX cards."""
    if INTERPRET:
        return 99
    device = torch.cuda.current_device()
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["max_shared_mem"]) >> 10


def compile_only(work: Callable[[], None]) -> None:
    """Kernels that `work` launches, in this thread, and that are not compiled yet are compiled and
    do not run: side by side, by as many threads as there are cores, since Triton's compiler holds
    the interpreter's lock for a tenth of its time. When it returns, all are.

    Raises what the compiler raises.
    """

    def compile_all() -> None:
        _compile_only.set(set())
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
            work()

    copy_context().run(compile_all)  # else Triton's mode stays on where its compiler fails


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
        """dtype: that of all tensors whose dtype varies, or all of these; None for one that is
        absent. The last constant, PDL, is added here."""
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
    """Let the next kernel start; wait for the one before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait(PDL: tl.constexpr):
    """For the kernel before; let the next one start only when this one has ended."""
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
