"""What a successor has from the server before it."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

Flags = list[list[str]]
"""The flags of the first server, and those of each upgrade."""


class Handed(socket.socket):
    """A socket on which the old server sends connections: it accepts as a listening one does."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection and its address. Raises EOFError when the old server has gone, and
        OSError as a listening socket does: a connection for which no descriptor is free is lost."""
        data, descriptors, _, _ = socket.recv_fds(self, 1, 1)
        if not data:
            raise EOFError
        if not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        connection = socket.socket(fileno=descriptors[0])
        return connection, connection.getpeername()


class Inherited(socket.socket):
    """The listening socket of a successor, with the other sockets and its flags."""

    link: socket.socket
    handed: Handed
    kin: socket.socket
    flags: Flags
