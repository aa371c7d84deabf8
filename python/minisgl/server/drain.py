"""Lets open requests finish before a server or a router ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

CHECK_S: Final = 0.05


async def finish_open(num_open: Callable[[], int], timeout_s: float) -> None:
    """Wait until no request is open, or for `timeout_s` (`--drain-timeout`).

    num_open: returns the number of open requests. The caller must refuse new ones.
    """
    if not timeout_s or not num_open():
        return
    logger.info("draining: %d requests are open, for at most %g s", num_open(), timeout_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while num_open():
                await asyncio.sleep(CHECK_S)
    if num_left := num_open():
        logger.warning("%d requests did not finish within --drain-timeout", num_left)
