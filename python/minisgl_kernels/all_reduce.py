"""The host side of `csrc/all_reduce.cu`: compilation, constants, arguments."""

from __future__ import annotations

import ctypes

import torch

from minisgl_kernels import CSRC
from minisgl_kernels.cubin import load_cubin

THREADS = 128
"""The threads of a block, each with a pack. So the 10 KB of a row of Qwen3-32B are spread over 5
multiprocessors."""
ROW_THREADS = 640
"""The most threads of a block that has a row: a row of Qwen3-32B is one pack for each."""
ROW_ITEMS = 4  # the most packs of a row that a thread holds
PACK_BYTES = 16  # the widest load or store of one thread
EMPTY = 0xFFFFFFFF  # a word of the shared memory where nothing has arrived
ALGORITHMS = ("one_shot", "two_shot")
TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}


class Rows(ctypes.Structure):
    """struct Rows: the addresses of x, residual and weight; the number of rows; the packs of a row;
    whether there is a residual; whether the weight is float32 and x is not; eps."""

    _fields_ = (
        ("x", ctypes.c_int64),
        ("residual", ctypes.c_int64),
        ("weight", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("packs", ctypes.c_int64),
        ("has_residual", ctypes.c_int64),
        ("float_weight", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


def all_reduce_cubin(device: torch.device, num_ranks: int) -> bytes:
    """Compile the kernels "ALGORITHM_TYPE" and "add_norm_ALGORITHM_TYPE" for this device and number
    of ranks. Returns a cubin. Raises JitUnavailable.
    """
    major, minor = torch.cuda.get_device_capability(device)
    defines = (f"NUM_RANKS={num_ranks}", f"NUM_THREADS={THREADS}", f"ROW_THREADS={ROW_THREADS}")
    return load_cubin(CSRC, "all_reduce", f"sm_{major}{minor}", defines, ("peer_memory.cuh",))
