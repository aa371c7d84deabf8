"""Fetches the engine's frames for open X-rays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from minisgl.message import WatchMsg
from minisgl.utils.zmq import PushQueue

RENEW_S: Final = 1.0
LEASE_S: Final = 3.0
"""How long the engine makes frames after each request for them."""
MAX_BEHIND: Final = 20
"""The most frames kept for a slow reader. Older ones are dropped."""


class Watchers:
    """The open X-rays. Mutable. If there are none, the engine makes no frames."""

    def __init__(self, tokenizers: Sequence[PushQueue]) -> None:
        self._tokenizer = tokenizers[0]
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._renewal: asyncio.Task[None] | None = None
        self._is_over = False

    def deliver(self, frame: bytes) -> None:
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(frame)

    def close(self) -> None:
        """End all X-rays, because the server stops or has lost a worker."""
        self._is_over = True
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield frames until the server stops."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BEHIND)
        self._queues.add(queue)
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())
        try:
            while not self._is_over and (frame := await queue.get()) is not None:
                yield frame
        finally:
            self._queues.discard(queue)

    async def _renew(self) -> None:
        while self._queues and not self._is_over:
            self._tokenizer.put([WatchMsg(seconds=LEASE_S)])
            await asyncio.sleep(RENEW_S)
        self._renewal = None
