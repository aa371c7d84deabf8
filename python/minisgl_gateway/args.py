"""The flags that `serve` has of this package: of several machines, with the ranks and ports of a
node, and of restarts. Wrong ones are refused before any process starts."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Final

from minisgl.core.args import SWITCH, option, text, whole
from minisgl.server.args import ServerArgs

MAX_BASE_PORT: Final = 64_999  # the ranks use ports above it, at most 1 + --tp


def is_interface(host: str) -> bool:
    """Return whether `host` may be the address of one interface, or is a name.

    False for the IPv4 addresses of all interfaces, multicast groups and broadcast. 0, 00.0.0.0 and
    0x0 are spellings of 0.0.0.0.
    """
    try:
        address = ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return True
    is_broadcast = int(address) == 2**32 - 1
    return not (address.is_unspecified or address.is_multicast or is_broadcast)


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    is_host = bool(host) and ":" not in host and is_interface(host)
    is_port = port.isascii() and port.isdigit()
    return is_host and is_port and 1 <= int(port) <= MAX_BASE_PORT


_ADDRESS: Final = text(
    f"HOST:PORT with a port from 1 to {MAX_BASE_PORT} and the IPv4 address or name of one "
    "interface",
    _is_address,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayArgs(ServerArgs):
    """The options of a server (the row `server` of `options`), on one machine or several.

    `minisgl_gateway.nodes.join` says what the ports are for.
    """

    nnodes: int = option(
        1,
        whole(1, 1024),
        "many devices",
        "machines that share the --tp ranks equally; start the same command on each, with its "
        "--node-rank; for trusted networks only",
    )
    node_rank: int = option(
        0,
        whole(0, 1023),
        "many devices",
        "which of the machines this is; 0 is the one that serves HTTP",
        metavar="R",
    )
    dist_init_addr: str | None = option(
        None,
        _ADDRESS,
        "many devices",
        "where the machines meet: an IPv4 address or name of node 0's interface, and the first of "
        "1 + --tp free ports",
        metavar="HOST:PORT",
    )
    restart: bool = option(
        False,
        SWITCH,
        "running",
        "after a worker has died or hangs, start the engine again behind the same port; until then "
        "requests get HTTP 503",
    )
    max_restarts: int = option(
        3,
        whole(1),
        "running",
        "the most restarts within an hour; the server ends at the next failure",
    )

    @property
    def local_ranks(self) -> range:
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        each = self.tp // self.nnodes
        return range(node * each, (node + 1) * each)

    @property
    def meeting_point(self) -> tuple[str, int]:
        """The host and the port at which the supervisors meet."""
        assert self.dist_init_addr is not None
        host, _, port = self.dist_init_addr.rpartition(":")
        return host, int(port)

    @property
    def store_port(self) -> int:
        return self.meeting_point[1] + 1

    def broadcast_port(self, rank: int) -> int:
        """Return the port at which a rank of another node receives the broadcasts of rank 0."""
        return self.store_port + rank

    @property
    def ports(self) -> list[int]:
        """All ports. The ranks of node 0 need none for broadcasts."""
        others = range(self.tp // self.nnodes, self.tp)
        return [self.meeting_point[1], self.store_port, *map(self.broadcast_port, others)]

    def conflict(self) -> str | None:
        if wrong := ServerArgs.conflict(self):
            return wrong
        if self.nnodes == 1:
            if self.node_rank or self.dist_init_addr:
                return "--node-rank and --dist-init-addr need --nnodes 2 or more"
        elif self.dp > 1:
            return (
                f"--dp {self.dp} does not go with --nnodes: start a server on each machine, and "
                "minisgl route before them"
            )
        elif self.restart:
            return "--restart works on one machine, so it does not go with --nnodes"
        elif self.node_rank >= self.nnodes:
            return f"--node-rank counts from 0 to {self.nnodes - 1}, got {self.node_rank}"
        elif self.dist_init_addr is None:
            return (
                f"--nnodes {self.nnodes} needs --dist-init-addr HOST:PORT, the same on each machine"
            )
        elif self.tp % self.nnodes:
            return f"--tp {self.tp} cannot be divided by --nnodes {self.nnodes}"
        elif self.dry_run:
            return "--dry-run looks at one machine, so it does not go with --nnodes"
        elif self.shell and self.node_rank:
            return "a chat needs the server, which is on node 0"
        elif self.node_rank == 0 and self.http_port in (taken := self.ports):
            return (
                f"--port {self.http_port} is one of the ports, from {taken[0]} to {taken[-1]}, "
                f"that the nodes use among themselves (--dist-init-addr {self.dist_init_addr}); "
                "choose another"
            )
        return None
