"""The gated delta rule of prompts on Hopper: the host side of `csrc/cuda/delta_prepare.cu` and
`csrc/cuda/delta_scan.cu`.

They compute what the kernels of `minisgl.kernel.triton.delta_extend` compute, for intervals of 64
tokens and heads of 128. There is a kernel of each for each dtype of the activations. NVRTC compiles
one in 2 s, and it is cached on disk.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from minisgl.kernel.hopper import TYPES, Kernels, load_gemm, multiply_source
from minisgl.kernel.jit import load_cubin

INTERVAL, DIM = 64, 128  # tokens of an interval; numbers of a key and of a value
MAX_SHARE = 8  # value heads of a key head
PREPARE_BESIDE = (2 + 2 * MAX_SHARE) * INTERVAL * 4  # bytes beside the matrices
PREPARE_SHARED = 4 * INTERVAL * 128 + PREPARE_BESIDE + 1024  # to align them
STAGES, STAGE_BYTES = 3, 64 << 10
BESIDE = STAGES * (5 * INTERVAL * 4 + 8 + 16)  # bytes beside the stages: factors and barriers
SHARED = STAGES * STAGE_BYTES + BESIDE + 1024


class _Delta(ctypes.Structure):
    """struct Delta of `csrc/cuda/delta.cuh`."""

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
    return load_cubin("delta_scan", "sm_90a", defines, headers, instructions)


class DeltaPrompts:
    """The kernels on the current device."""

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        otherwise = "Triton computes the delta rule of prompts"
        self._prepare = Kernels("delta_prepare", prepare_cubin, otherwise, prefer_shared=True)
        self._scan = Kernels("delta_scan", scan_cubin, otherwise)
        for kernels in (self._prepare, self._scan):
            kernels.begin_compiling(torch.bfloat16)

    def takes(self, mixed_TD: Tensor, states: Tensor, keys: Tensor, interval: int) -> bool:
        """Return whether prompts with these tensors can be computed here. Compiles the kernels."""
        if mixed_TD.dtype not in TYPES or interval != INTERVAL or states.shape[2:] != (DIM, DIM):
            return False
        if states.shape[1] > MAX_SHARE * keys.shape[1]:
            return False
        kernels = (self._prepare, self._scan)
        return all(of.get(mixed_TD.dtype) is not None for of in kernels)

    def extend(
        self,
        mixed_TD: Tensor,
        g_TN: Tensor,
        beta_TN: Tensor,
        states: Tensor,
        keys: Tensor,
        updates: Tensor,
        decays: Tensor,
        slots: Tensor,
        rows: Tensor,
        row_table: Tensor,
        state_table: Tensor,
        out_TNV: Tensor,
        *,
        most: int,
        page_size: int,
    ) -> None:
        """See `minisgl.kernel.triton.delta_extend.extend`. most: at least the number of
        intervals."""
        num_rows, num_heads, num_key_heads = rows.shape[1], states.shape[1], keys.shape[1]

        def prepared(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.empty((most, num_heads, *shape), dtype=dtype, device=states.device)

        tensors = (
            mixed_TD, g_TN, beta_TN, states, keys, updates, decays, slots, state_table, out_TNV,
            prepared(INTERVAL, INTERVAL), prepared(INTERVAL, INTERVAL),
            prepared(3, INTERVAL, dtype=torch.float32), row_table, rows,
        )  # fmt: skip
        delta = _Delta(
            *(tensor.data_ptr() for tensor in tensors),
            num_rows, rows.stride(0), row_table.stride(0), state_table.stride(0), num_heads,
            num_key_heads, page_size,
        )  # fmt: skip
        for kernels, blocks, threads, shared in (
            (self._prepare, most * num_key_heads, 128, PREPARE_SHARED),
            (self._scan, num_rows * num_heads, 384, SHARED),
        ):
            kernel = kernels.get(mixed_TD.dtype)
            kernels.launch(kernel, blocks, threads, shared, ctypes.addressof(delta))
