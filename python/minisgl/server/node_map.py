"""Which ranks and ports each of several nodes has; what they are for is in `minisgl.server.nodes`.

Known from the flags alone, so that flags that cannot be are refused before anything starts.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.server.args import ServerArgs


def ranks_of(args: ServerArgs, node: int) -> range:
    num_local = args.tp // args.nnodes
    return range(node * num_local, (node + 1) * num_local)


def split_address(args: ServerArgs) -> tuple[str, int]:
    """The host and the port at which the supervisors meet."""
    assert args.dist_init_addr is not None
    host, _, port = args.dist_init_addr.rpartition(":")
    return host, int(port)


def store_port(args: ServerArgs) -> int:
    return split_address(args)[1] + 1


def beats_port(args: ServerArgs, rank: int) -> int:
    """Rank 0's node hears its beats without one."""
    return store_port(args) + rank


def ports_of_nodes(args: ServerArgs) -> list[int]:
    others = [rank for node in range(1, args.nnodes) for rank in ranks_of(args, node)]
    return [split_address(args)[1], store_port(args), *(beats_port(args, r) for r in others)]


def is_interface(host: str) -> bool:
    """False for an IPv4 address of all interfaces, of a group or of everybody. A name may be one's.

    0, 00.0.0.0 and 0x0 are spellings of 0.0.0.0.
    """
    try:
        address = ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return True
    is_everybody = int(address) == 2**32 - 1
    return not (address.is_unspecified or address.is_multicast or is_everybody)
