"""TCP connections that end when the other machine is gone.

If a process ends, its system closes its connections. If a machine or a cable fails, the other end
of a connection hears nothing, and a read waits forever.
"""

from __future__ import annotations

import socket


def keep_alive(connection: socket.socket, idle_s: int, every_s: int, num_asks: int) -> None:
    """Let reads and writes fail if the other machine is silent.

    idle_s: seconds of silence until the system asks. every_s: seconds between two of the `num_asks`
    questions. A write that is not confirmed fails after the same time.
    """
    all_ms = 1000 * (idle_s + every_s * num_asks)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", idle_s),
        ("TCP_KEEPINTVL", every_s),
        ("TCP_KEEPCNT", num_asks),
        ("TCP_USER_TIMEOUT", all_ms),
    ):
        if hasattr(socket, option):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
