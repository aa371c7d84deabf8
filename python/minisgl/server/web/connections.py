"""The connections that a server keeps: fewer than the descriptors that the process may open.

A connection *waits* while its client owes a whole request, and is *served* from then until the
answer is sent. At the bound a new connection takes the place of one that waits: of the address with
the most such connections, the one that has waited longest. So a client that opens many connections
displaces its own.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

MOST_DESCRIPTORS: Final = 16_384
"""The soft limit that a server asks for, if the hard limit allows it: two connections for each of
8,000 requests, more than one process can answer."""

RESERVE: Final = 128
"""Descriptors for all but connections: the sockets to the workers, files, and the connections that
are accepted before displaced ones are closed (48, and `EXTRA`)."""

EXTRA: Final = 16
"""Connections above the bound while all others are served, so that probes get an answer."""

FEWEST: Final = 8
"""The bound at a limit of descriptors that is too low for a server."""

SAY_S: Final = 60.0
"""The least time between two lines of the log about the bound."""


class Connection(Protocol):
    """What is kept. address: of the client."""

    address: str

    def release(self) -> socket.socket | None:
        """Return the socket, and forget it, if no byte of a request or an answer is under way; else
        None. What encrypts the connection is lost."""

    def displace(self) -> None:
        """Close the connection, which waits, for a new one."""


class Connections:
    """The open connections. Mutable. most: the bound. on_wait: called with a connection that begins
    to wait. is_leaving: no more are accepted. closes: each closes after its next answer."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.on_wait: Callable[[Connection], None] = lambda connection: None
        self.is_leaving = self.closes = False
        self._waiting: dict[str, dict[Connection, None]] = {}  # by address, the longest wait first
        self._open: set[Connection] = set()
        self._said_at = -SAY_S

    def add(self, connection: Connection) -> None:
        """Keep a new connection, which waits."""
        self._open.add(connection)
        self.wait(connection)

    def wait(self, connection: Connection) -> None:
        """Note that the connection waits for its client from now on."""
        if connection in self._open:
            self.serve(connection)
            self._waiting.setdefault(connection.address, {})[connection] = None
            self.on_wait(connection)

    @property
    def waiting(self) -> list[Connection]:
        """The connections that wait."""
        return [connection for waiting in self._waiting.values() for connection in waiting]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def serve(self, connection: Connection) -> None:
        """Note that the connection has a whole request, so that it is not displaced."""
        waiting = self._waiting.get(connection.address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(connection.address, None)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that ends. A second call does nothing."""
        if connection in self._open:
            self._open.remove(connection)
            self.serve(connection)

    def make_room(self) -> bool:
        """Return whether one more connection may be kept. At the bound one that waits is closed."""
        return len(self._open) < self.most or self.displace() or len(self._open) < self.most + EXTRA

    def displace(self) -> bool:
        """Close a connection that waits. Returns False if there is none."""
        now = time.monotonic()
        if now - self._said_at >= SAY_S:
            self._said_at = now
            logger.warning(
                "%d connections are open, and there are descriptors for %d (ulimit -n): new ones "
                "displace those that wait for their clients",
                len(self._open),
                self.most,
            )
        if not self._waiting:
            return False
        most = max(self._waiting.values(), key=lambda waiting: len(waiting))
        connection = next(iter(most))
        self.remove(connection)
        connection.displace()
        return True

    @property
    def is_full(self) -> bool:
        """Whether not one more connection may be kept."""
        return not self._waiting and len(self._open) >= self.most + EXTRA

    @property
    def is_over(self) -> bool:
        """Whether there are more connections than the bound, because all others are served."""
        return len(self._open) > self.most


def client_address(name: str) -> str:
    """Return what stands for one client: an IPv4 address, or the 64-bit prefix of an IPv6 address,
    of which every host has all the others."""
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name
    if isinstance(address, ipaddress.IPv4Address):
        return name
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return f"{int(address) >> 64:x}::/64"


def most_connections(per_connection: int = 1) -> int:
    """Raise this process's soft limit of descriptors, and return how many connections fit below it.

    per_connection: descriptors that a connection needs; a router opens another one for each.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)
    return max((limit - _num_descriptors() - RESERVE) // per_connection, FEWEST)


def _num_descriptors() -> int:
    """Return how many descriptors are open; 0 where the system has no list of them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


# --- accepting -----------------------------------------------------------------------------------

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
    """Accept connections until this is cancelled, or `connections` are leaving.

    asyncio's own loop accepts all that wait before it starts one of them, so it may take more
    descriptors than there are, and then it logs each failure.

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
        while not connections.is_leaving:
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
                [protocol].pop,  # called once: returns the protocol
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
    except asyncio.CancelledError:
        for task in list(starting):
            task.cancel()
        raise
