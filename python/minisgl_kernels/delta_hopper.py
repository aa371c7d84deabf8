"""The gated delta rule of prompts on Hopper: the host side of `csrc/delta_prepare.cu` and
`csrc/delta_scan.cu`.

They compute what the kernels of `minisgl_kernels.triton.delta_extend` compute, for intervals of 64
tokens and heads of 128. There is a kernel of each for each dtype of the activations. NVRTC compiles
one in 2 s, and it is cached on disk.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from minisgl_kernels import CSRC
from minisgl_kernels.cubin import load_cubin
from minisgl_kernels.hopper import TYPES, Kernels, load_gemm, multiply_source
from minisgl_zoo.recurrent.delta_rule import DeltaStep

INTERVAL, DIM = 64, 128  # tokens of an interval; numbers of a key and of a value
MAX_SHARE = 8  # value heads of a key head
PREPARE_BESIDE = (2 + 2 * MAX_SHARE) * INTERVAL * 4  # bytes beside the matrices
PREPARE_SHARED = 4 * INTERVAL * 128 + PREPARE_BESIDE + 1024  # to align them
STAGES, STAGE_BYTES = 3, 64 << 10
BESIDE = STAGES * (5 * INTERVAL * 4 + 8 + 16)  # bytes beside the stages: factors and barriers
SHARED = STAGES * STAGE_BYTES + BESIDE + 1024


class _Delta(ctypes.Structure):
    """struct Delta of `csrc/delta.cuh`."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("mixed", "g", "beta", "states", "keys", "updates", "decays", "slots"),
                *("state_table", "out", "inverses", "scores", "factors", "row_table", "rows"),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("num_rows", "rows_stride", "row_stride", "state_stride", "heads", "key_heads"),
                "page_size",
            )
        ),
    )


def prepare_cubin(dtype: torch.dtype) -> bytes:
    """dtype: of the activations. Raises JitUnavailable."""
    numbers = {"MAX_SHARE": MAX_SHARE, "BESIDE": PREPARE_BESIDE}
    return load_gemm("delta_prepare", dtype, [INTERVAL], numbers, ["delta.cuh"])


def scan_cubin(dtype: torch.dtype) -> bytes:
    """dtype: of the activations. Raises JitUnavailable."""
    instructions = "".join(
        multiply_source(INTERVAL, "f16", from_registers=True, name=name, transposed=transposed)
        for name, transposed in (("multiply", False), ("multiply_across", True))
    )
    defines = f"STAGES={STAGES}", f"BESIDE={BESIDE}", f"BFLOAT16={int(dtype == torch.bfloat16)}"
    headers = ("hopper.cuh", "delta.cuh", "delta_fetch.cuh")
    return load_cubin(CSRC, "delta_scan", "sm_90a", defines, headers, instructions)


class DeltaPrompts:
    """The kernels on the current device."""

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        otherwise = "Triton computes the delta rule of prompts"
        self._prepare = Kernels("delta_prepare", prepare_cubin, otherwise, prefer_shared=True)
        self._scan = Kernels("delta_scan", scan_cubin, otherwise)
        for kernels in (self._prepare, self._scan):
            kernels.begin_compiling(torch.bfloat16)

    def takes(self, step: DeltaStep) -> bool:
        """Return whether prompts with these tensors can be computed here. Compiles the kernels."""
        dtype, sizes = step.mixed_TD.dtype, step.states.shape[2:]
        if dtype not in TYPES or sizes != (DIM, DIM) or step.interval != INTERVAL:
            return False
        if step.skip_N is not None or step.num_heads > MAX_SHARE * step.num_key_heads:
            return False
        return all(of.get(dtype) is not None for of in (self._prepare, self._scan))

    def extend(self, step: DeltaStep, most: int) -> None:
        """See `minisgl_kernels.triton.delta_extend.extend`. most: at least the number of
        intervals."""
        num_rows, num_heads = step.rows.shape[1], step.num_heads

        def prepared(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.empty((most, num_heads, *shape), dtype=dtype, device=step.states.device)

        tensors = (
            step.mixed_TD, step.g_TN, step.beta_TN, step.states, step.keys, step.updates,
            step.decays, step.slots, step.state_table, step.out_TNV,
            prepared(INTERVAL, INTERVAL), prepared(INTERVAL, INTERVAL),
            prepared(3, INTERVAL, dtype=torch.float32), step.row_table, step.rows,
        )  # fmt: skip
        delta = _Delta(
            *(tensor.data_ptr() for tensor in tensors),
            num_rows, step.rows.stride(0), step.row_table.stride(0), step.state_table.stride(0),
            num_heads, step.num_key_heads, step.page_size,
        )  # fmt: skip
        for kernels, blocks, threads, shared in (
            (self._prepare, most * step.num_key_heads, 128, PREPARE_SHARED),
            (self._scan, num_rows * num_heads, 384, SHARED),
        ):
            kernel = kernels.get(step.mixed_TD.dtype)
            kernels.launch(kernel, blocks, threads, shared, ctypes.addressof(delta))
