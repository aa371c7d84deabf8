"""Stops work for a client that has left, or because the process ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from minisgl.server.errors import Draining
from minisgl.server.web.http import wait_for_disconnect

T = TypeVar("T")

_TASK_NAME: Final = "work of an open request"


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return what `work` returns. Cancel it and raise ClientDisconnect when the client leaves.
    Raises Draining if `end_open` has cancelled it."""
    working = asyncio.create_task(work, name=_TASK_NAME)
    watching = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        has_left = watching.done()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if working.cancelled():
        raise ClientDisconnect if has_left else Draining
    return working.result()


def end_open() -> None:
    """Cancel the work of all open requests of this loop. An answer that has begun ends as `ending`
    says; else `while_connected` raises Draining."""
    for task in asyncio.all_tasks():
        if task.get_name() == _TASK_NAME:
            task.cancel("end_open")


def ending(cancelled: asyncio.CancelledError) -> Draining:
    """Return what to tell a client whose work is cancelled. Raises `cancelled` if it has left."""
    if not cancelled.args:
        raise cancelled
    return Draining()
