"""Gives the connections of an old server to its successor, as soon as they are idle."""

from __future__ import annotations

import asyncio
import socket
from collections import deque

from minisgl.server.web.connections import Connection, Connections


class HandOver:
    """Mutable: connections that are released wait until the successor's socket has room."""

    def __init__(self, connections: Connections, successor: socket.socket) -> None:
        """successor: the socket on which it gets connections; it does not block."""
        self._connections, self._successor = connections, successor
        self._released: deque[socket.socket] = deque()
        self._loop = asyncio.get_running_loop()
        connections.on_wait = self._on_wait

    @property
    def num_waiting(self) -> int:
        """The connections that are released, and not given yet."""
        return len(self._released)

    def give(self) -> None:
        """Give all that are idle. Called again and again: the successor's socket may be full."""
        for connection in self._connections.waiting:
            self._release(connection)
        self._send()

    def end(self) -> None:
        """Give none any more."""
        self._connections.on_wait = lambda connection: None

    def _on_wait(self, connection: Connection) -> None:
        self._loop.call_soon(self._release, connection)

    def _release(self, connection: Connection) -> None:
        if released := connection.release():
            self._released.append(released)
            self._send()

    def _send(self) -> None:
        while self._released:
            try:
                socket.send_fds(self._successor, [b"c"], [self._released[0].fileno()])
            except BlockingIOError:
                return
            except OSError:
                pass  # the successor has gone: this closes the connection
            self._released.popleft().close()
