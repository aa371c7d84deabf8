"""The connection between two nodes' supervisors: typed records over TCP.

After the start a supervisor sends one record only, `Gone`, when it ends. If it cannot send that,
the connection breaks: at once if its process ends, after some seconds (`KEEPALIVE`) if its machine
or a cable fails. ZeroMQ would hide both cases.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from minisgl.errors import EngineError
from minisgl_gateway.keepalive import keep_alive

HELLO_S: Final = 5.0  # a connection that is silent for this long does not come from a node
MAX_BYTES: Final = 1 << 16  # of a record; the longest is a few kilobytes of settings
# See `keep_alive`. A cut cable is noticed after 5 s, and all has ended within 6
# (scripts/try_two_nodes.sh).
KEEPALIVE: Final = (2, 1, 3)


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Record, frozen=True, kw_only=True):
    """A node other than 0 wants to take part. settings: see `minisgl_gateway.nodes.settings`."""

    node: int
    settings: dict[str, str]


class Accepted(_Record, frozen=True, kw_only=True):
    """The node may take part. It waits until all nodes are here, however long that takes."""


class Welcome(_Record, frozen=True, kw_only=True):
    """All nodes are here. The receiver starts its ranks."""


class Refused(_Record, frozen=True, kw_only=True):
    """The node may not take part; the message says why."""

    message: str


class Gone(_Record, frozen=True, kw_only=True):
    """The sender ends. reason: None if the user asked node 0 to end."""

    reason: str | None


NodeMsg = Hello | Accepted | Welcome | Refused | Gone


class NodeLink:
    """The connection to another node's supervisor. Mutable: it can be closed."""

    def __init__(self, name: str, connected: socket.socket) -> None:
        self.name = name
        self.address = str(connected.getpeername()[0])
        self.own_address = str(connected.getsockname()[0])
        keep_alive(connected, *KEEPALIVE)
        connected.settimeout(None)
        # A timeout for each read: half of a record must not block forever.
        limit = struct.pack("@ll", int(HELLO_S), int(HELLO_S % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.status = Connection(connected.detach())  # frames; nothing is ever pickled

    def send(self, record: NodeMsg) -> None:
        with contextlib.suppress(OSError):  # the node is gone, which `receive` reports
            self.status.send_bytes(msgspec.msgpack.encode(record))

    def leave(self, reason: str | None) -> None:
        self.send(Gone(reason=reason))

    def receive(self, timeout_s: float | None = None) -> NodeMsg:
        """Wait for a record. Raises EngineError if the node is gone or sends something else."""
        try:
            if self.status.poll(timeout_s):
                data = self.status.recv_bytes(MAX_BYTES)
                record: NodeMsg = msgspec.msgpack.decode(data, type=NodeMsg)
                return record
        except (EOFError, OSError, msgspec.DecodeError) as error:
            raise EngineError(
                f"{self.name} at {self.address} is gone: its process has ended, or its machine "
                f"cannot be reached ({type(error).__name__}); the server cannot go on without it"
            ) from error
        raise EngineError(f"{self.name} at {self.address} says nothing")

    def death(self) -> EngineError | None:
        """Return the error that says why the node ended; None if the user asked for it. Call this
        when `status` is readable."""
        try:
            record = self.receive(HELLO_S)
        except EngineError as error:
            return error
        if isinstance(record, Gone) and record.reason is None:
            return None
        return EngineError(f"{self.name} at {self.address}: {getattr(record, 'reason', record)}")

    def close(self) -> None:
        self.status.close()
