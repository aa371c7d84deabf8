"""The address of a server: its port and URL, checked before the model is loaded."""

from __future__ import annotations

import errno
import socket

from minisgl.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises ConfigError."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: it can be no name of a host
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host}: {reason}; give one as 0.0.0.0 or ::1") from error
    family, kind, protocol, _, address = infos[0]
    bound = socket.socket(family, kind, protocol)
    # Without it, connections of a server that has just ended would keep the port for a minute.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refused(host, port, error) from error
    return bound


def listen(bound: socket.socket) -> None:
    """Accept connections. Raises ConfigError if another program listens there since `bind`."""
    try:
        bound.listen(2048)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _refused(host, port, error) from error


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """Return the URL at which this machine reaches the socket."""
    host, port = bound.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return (
        f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"
    )


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} is in use: stop the program that listens there, or choose another port "
            "with --port (0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} needs more rights: choose one above 1023 with --port")
    return ConfigError(f"cannot listen on --host {host}, port {port}: {error.strerror}")
