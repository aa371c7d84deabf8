"""What the hosts know of `csrc/cuda/all_reduce.cu`: how it is compiled, and its constants."""

from __future__ import annotations

import torch

from minisgl.kernel.jit import load_cubin

THREADS = 128
"""In a block, each with a pack: 10 KB, a row of Qwen3-32B, is then on 5 multiprocessors."""
PACK_BYTES = 16  # the widest that one thread loads or stores
EMPTY = 0xFFFFFFFF  # a word of the shared memory where nothing has arrived
ALGORITHMS = ("one_shot", "two_shot")
TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}


def all_reduce_cubin(device: torch.device, num_ranks: int) -> bytes:
    """Kernels "ALGORITHM_TYPE" for this device and so many ranks. Raises JitUnavailable."""
    major, minor = torch.cuda.get_device_capability(device)
    defines = (f"NUM_RANKS={num_ranks}", f"NUM_THREADS={THREADS}")
    return load_cubin("all_reduce", f"sm_{major}{minor}", defines)
