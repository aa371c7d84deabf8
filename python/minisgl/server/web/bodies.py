"""The memory of bodies that have not come whole: a budget for all, and a share for each client."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from typing import Final, Self

from minisgl.server.errors import refusal

MOST_BYTES: Final = 256 * 2**20
"""The budget: 16 bodies of the largest size."""

FREE_BYTES: Final = 64 * 2**10
"""The first bytes of each body, which do not count: uvicorn holds as many for each connection, and
most requests have fewer, so they never wait for room."""

ROOM_S = 5.0
"""The longest wait for room. A body of the largest size comes within it at 27 Mbit/s."""


class Bodies:
    """The bytes of unfinished bodies by owner, which is a key or an address. Mutable.

    An owner may take at most what it leaves free: one alone half of the budget, and of k greedy
    owners each 1 / (k + 1). So none can take all, and another one always finds room.
    """

    def __init__(self) -> None:
        self.most = MOST_BYTES
        self._taken: Counter[str] = Counter()
        self._given_back = asyncio.Event()

    def reading(self, owner: str) -> Reading:
        """Return a body that begins. Use it in a `with` block, which ends when the body does."""
        return Reading(self, owner)

    async def take(self, owner: str, num_bytes: int) -> None:
        """Wait for room, and take it. Raises InvalidRequest (503) if there is none in time."""
        try:
            async with asyncio.timeout(ROOM_S):
                while not self._fits(owner, num_bytes):
                    await self._given_back.wait()
        except TimeoutError:
            raise refusal(
                f"unfinished bodies take the memory that is meant for them ({self.most} bytes; one "
                "key or address gets at most what it leaves to others): send fewer large bodies at "
                "a time, and try again later",
                status=503,
                code="too_many_bodies",
            ) from None
        self._taken[owner] += num_bytes

    def _fits(self, owner: str, num_bytes: int) -> bool:
        left = self.most - self._taken.total() - num_bytes
        return self._taken[owner] + num_bytes <= left

    def give_back(self, owner: str, num_bytes: int) -> None:
        self._taken[owner] -= num_bytes
        if not self._taken[owner]:
            del self._taken[owner]
        self._given_back.set()  # wakes all that wait
        self._given_back.clear()


class Reading:
    """A body that is read. Mutable."""

    def __init__(self, bodies: Bodies, owner: str) -> None:
        self._bodies, self._owner, self._num_taken = bodies, owner, 0

    async def need(self, num_bytes: int) -> None:
        """Wait until there is room for `num_bytes` of this body. Raises InvalidRequest (503)."""
        if (more := num_bytes - FREE_BYTES - self._num_taken) > 0:
            await self._bodies.take(self._owner, more)
            self._num_taken += more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._num_taken:
            self._bodies.give_back(self._owner, self._num_taken)
