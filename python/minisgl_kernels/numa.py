"""On a CPU with several NUMA nodes, interleaves the pages of weights and caches over the nodes.

Each thread reads all weights. If they were on one node, all cores would wait for its memory.
`set_mempolicy(2)` interleaves the pages that this thread, and threads that it starts, touch first.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Final

from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

ONLINE: Final = Path("/sys/devices/system/node/online")
SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""Machine -> the number of the system call, for which glibc has no function."""
INTERLEAVE: Final = 3
WORD: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def online_nodes(text: str) -> list[int]:
    """Return the numbers in a list like "0-1,3"."""
    nodes: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def interleave(online: Path = ONLINE) -> bool:
    """Interleave memory that is allocated from now on, and log it. Returns whether the system
    does."""
    nodes = online_nodes(online.read_text())
    mask = (ctypes.c_ulong * (max(nodes) // WORD + 1))()
    for node in nodes:
        mask[node // WORD] |= 1 << (node % WORD)
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        logger.info("%d NUMA nodes: memory is where it is first touched", len(nodes))
        return False
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, INTERLEAVE, mask, ctypes.c_ulong(len(mask) * WORD + 1)):
        logger.info(
            "%d NUMA nodes: memory is where it is first touched, as the system refuses to "
            "interleave it (errno %d); try `numactl --interleave=all`",
            len(nodes),
            ctypes.get_errno(),
        )
        return False
    logger.info("%d NUMA nodes: weights and caches are interleaved over them", len(nodes))
    return True
