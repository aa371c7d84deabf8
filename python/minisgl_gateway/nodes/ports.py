"""The ranks and ports of each node. `minisgl_gateway.nodes.join` says what the ports are for.

They follow from the flags alone, so wrong flags are refused before any process starts.
"""

from __future__ import annotations

from minisgl.runtime.args import RuntimeArgs


def ranks_of(args: RuntimeArgs, node: int) -> range:
    """Return the ranks of a node."""
    return range(node * args.num_local, (node + 1) * args.num_local)


def split_address(args: RuntimeArgs) -> tuple[str, int]:
    """Return the host and the port at which the supervisors meet."""
    assert args.dist_init_addr is not None
    host, _, port = args.dist_init_addr.rpartition(":")
    return host, int(port)


def store_port(args: RuntimeArgs) -> int:
    """Return the port of torch's store."""
    return split_address(args)[1] + 1


def broadcast_port(args: RuntimeArgs, rank: int) -> int:
    """Return the port at which a rank of another node receives the broadcasts of rank 0."""
    return store_port(args) + rank


def ports_of_nodes(args: RuntimeArgs) -> list[int]:
    """Return all ports. The ranks of node 0 need none for broadcasts."""
    others = [rank for node in range(1, args.nnodes) for rank in ranks_of(args, node)]
    return [split_address(args)[1], store_port(args), *(broadcast_port(args, r) for r in others)]
