"""The length of the common prefix of two runs of token ids, for the prefix tree.

This module imports no torch. `load_common_prefix` does, when it loads the C++ twin.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl.core.req import IdArray
from minisgl.kernel.jit import load_library
from minisgl.kernel.once import JitUnavailable
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

CommonPrefix = Callable[[IdArray, IdArray], int]


def common_prefix_length(a: IdArray, b: IdArray) -> int:
    """Return the number of leading ids that a and b have in common: the specification, in NumPy."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def load_common_prefix() -> CommonPrefix:
    """Return the faster of the two: C++ if it compiles, else NumPy (one log line says so).

    Both take contiguous int32 arrays of one dimension.
    """
    try:
        compiled: CommonPrefix = load_library().common_prefix_length
    except JitUnavailable as error:
        logger.info("prefix tree: comparing token ids in NumPy (%s)", error)
        return common_prefix_length

    def common_prefix(a: IdArray, b: IdArray) -> int:
        try:
            return compiled(a, b)
        except BufferError:  # DLPack takes no read-only array
            return common_prefix_length(a, b)

    return common_prefix
