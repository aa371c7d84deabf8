"""Accepts connections.

asyncio's own loop accepts all that wait before it starts one of them, so it may take more
descriptors than there are, and then it logs each failure.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from minisgl.server.web.connections import Connections
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

AT_ONCE: Final = 16
"""Connections that are accepted in a turn of the event loop. Displaced ones are closed up to three
turns later, so the reserve of descriptors covers three turns."""

PAUSE_S: Final = 0.05
"""The time until the next try if there is no room, or if the system lacks descriptors."""

_NO_ROOM: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


async def accept(
    listening: socket.socket,
    connections: Connections,
    connect: Callable[[str], Any],
    tls: ssl.SSLContext | None,
    handshake_s: float,
) -> None:
    """Accept connections until this is cancelled.

    connect: makes the protocol of a connection from a client's address, and adds it to
    `connections`. Its `starting` is set to the task that makes its transport. handshake_s: the
    longest time of TLS's handshake.
    """
    loop = asyncio.get_running_loop()
    starting: set[asyncio.Task[Any]] = set()
    num_accepted = 0

    def started(protocol: Any, client: socket.socket, task: asyncio.Task[Any]) -> None:
        starting.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error:
            connections.remove(protocol)
            client.close()
        if error and not isinstance(error, OSError):  # else it does not speak TLS, or has left
            logger.error("a connection could not be made", exc_info=error)

    try:
        while True:
            while connections.is_full:
                await asyncio.sleep(PAUSE_S)
            try:
                client, peer = await loop.sock_accept(listening)
            except OSError as error:
                if is_lacking := error.errno in _NO_ROOM:
                    connections.displace()
                await asyncio.sleep(PAUSE_S if is_lacking else 0)  # else the client has left
                continue
            if not connections.make_room():  # it became full during the wait
                client.close()
                continue
            protocol = connect(peer[0])
            making = loop.connect_accepted_socket(
                partial(_itself, protocol),
                client,
                ssl=tls,
                ssl_handshake_timeout=handshake_s if tls else None,
            )
            protocol.starting = task = loop.create_task(making)
            starting.add(task)
            task.add_done_callback(partial(started, protocol, client))
            num_accepted += 1
            if num_accepted % AT_ONCE == 0:
                await asyncio.sleep(0)
    finally:
        for task in list(starting):
            task.cancel()


def _itself(protocol: Any) -> Any:
    return protocol
