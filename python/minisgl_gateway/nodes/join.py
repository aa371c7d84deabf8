"""Several machines: node 0 serves, and each other node runs its ranks of node 0's engine.

::

    node 0   listen | <-- Hello, Accepted --> | Welcome --> | start ranks | serve      | Gone -->
    node r   connect until it does            |             | start ranks | watch them | end

Each node's supervisor has one TCP connection to node 0's (`minisgl_gateway.nodes.link`). The ranks
meet as on one machine, but over TCP::

    PORT        this connection          PORT + 1 + r   rank 0's broadcasts, at the node of rank r
    PORT + 1    torch's store

Nothing is encrypted or authenticated, so each machine of the network must be trusted. On node 0 all
ports are bound to the interface of `--dist-init-addr`, on other nodes to that of the route to it.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import time
from multiprocessing.connection import wait
from typing import Any, Final

from minisgl.errors import ConfigError, EngineError
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted
from minisgl.utils.zmq import Endpoints
from minisgl_gateway.args import GatewayArgs, is_interface
from minisgl_gateway.nodes.link import (
    HELLO_S,
    Accepted,
    Hello,
    NodeLink,
    Refused,
    Welcome,
)
from minisgl_gateway.nodes.settings import difference

logger = get_logger(__name__)

JOIN_S: Final = 300.0  # nodes may be started by hand, and fetch the checkpoint first
RETRY_S: Final = 0.3
ANSWER_S: Final = 20.0  # node 0 waits `HELLO_S` for each silent connection, else answers at once


def gather_nodes(args: GatewayArgs, settings: dict[str, str]) -> list[NodeLink]:
    """On node 0: wait for all other nodes. Returns their links in the order of the nodes.

    Raises ConfigError if this node cannot listen.
    """
    host, port = args.meeting_point
    links: dict[int, NodeLink] = {}
    with _listening(host, port) as listener:
        _check_free(host, args.store_port)
        awaited = counted(args.nnodes - 1, "other node")
        logger.info("waiting for %s at %s:%d", awaited, host, port)
        while len(links) < args.nnodes - 1:
            ready = wait([listener, *(link.status for link in links.values())])
            for node, link in list(links.items()):
                if link.status in ready:  # it ended before the start and may come again
                    logger.warning("%s", link.death())
                    links.pop(node).close()
            if listener in ready:
                _admit(args, settings, listener.accept()[0], links)
    for link in links.values():
        link.send(Welcome())
    return [links[node] for node in sorted(links)]


def _admit(
    args: GatewayArgs,
    settings: dict[str, str],
    connected: socket.socket,
    links: dict[int, NodeLink],
) -> None:
    """Add a node that has just connected to `links`, or refuse it and say why."""
    try:
        link = NodeLink("a node", connected)
        record = link.receive(HELLO_S)
    except (OSError, EngineError) as error:
        logger.warning("a connection came that is not from a node: %s", error)
        return
    awaited = sorted(set(range(1, args.nnodes)) - set(links))
    if not isinstance(record, Hello):
        refusal = "it does not say which node it is"
    elif record.node not in awaited:
        refusal = f"--node-rank {record.node} is not awaited; awaited are {awaited}"
    elif not (refusal := difference(settings, record.settings)):
        link.name = f"node {record.node}"
        links[record.node] = link
        link.send(Accepted())
        logger.info("%s is here, from %s", link.name, link.address)
        return
    logger.warning("refused a node at %s: %s", link.address, refusal)
    link.send(Refused(message=refusal))
    link.close()


def join_node_0(args: GatewayArgs, settings: dict[str, str]) -> NodeLink:
    """On another node: wait for node 0 and all other nodes. Returns the link to node 0.

    Raises ConfigError if node 0 refuses this node or a port of its ranks is taken, EngineError if
    node 0 ends.
    """
    host, port = args.meeting_point
    link = NodeLink("node 0", _connect(host, port))
    try:
        for rank in args.local_ranks:
            _check_free(link.own_address, args.broadcast_port(rank))
    except ConfigError:
        link.close()
        raise
    link.send(Hello(node=args.node_rank, settings=settings))
    try:
        record = link.receive(ANSWER_S)
    except EngineError as error:
        link.close()
        raise EngineError(
            f"what listens at --dist-init-addr {host}:{port} is not node 0, or node 0 has just "
            "ended; start node 0, then this node again, or choose another port, the same on all "
            "nodes"
        ) from error
    if isinstance(record, Accepted):
        logger.info("connected to %s:%d; waiting until all nodes are here", host, port)
        record = link.receive()
    if isinstance(record, Refused):
        link.close()
        raise ConfigError(f"node 0 refuses this node: {record.message}")
    if not isinstance(record, Welcome):
        raise EngineError(f"node 0 at {host}:{port} answers with {record}")
    return link


def with_network(endpoints: Endpoints, args: GatewayArgs, links: list[NodeLink]) -> Endpoints:
    """Return `endpoints` with TCP addresses for communication between nodes.

    links: on node 0 the links to all other nodes, in order; on another node the link to node 0.
    """
    leader = links[0].own_address if args.node_rank == 0 else links[0].address
    broadcasts: dict[int, str] = {}
    for node in range(1, args.nnodes):
        if args.node_rank in (0, node):  # this node needs no other addresses
            at = links[node - 1].address if args.node_rank == 0 else links[0].own_address
            ports = {rank: args.broadcast_port(rank) for rank in args.ranks_of(node)}
            broadcasts |= {rank: f"tcp://{at}:{port}" for rank, port in ports.items()}
    store_url = f"tcp://{leader}:{args.store_port}"
    return dataclasses.replace(endpoints, store_url=store_url, broadcast_urls=broadcasts)


def _listening(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError."""
    try:
        return socket.create_server(_resolve(host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} is in use at {host}: stop the program that listens there, or choose "
                "another port with --dist-init-addr, the same on all nodes (it is the first of "
                "1 + --tp ports)"
            ) from error
        raise ConfigError(
            f"--dist-init-addr {host}:{port} must be an address of this machine, node 0: "
            f"{os.strerror(error.errno or 0)}"
        ) from error


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError if a rank of this node could not listen there."""
    _listening(host, port).close()


def _connect(host: str, port: int) -> socket.socket:
    address = _resolve(host, port)
    deadline, is_logged = time.monotonic() + JOIN_S, False
    while True:
        try:
            return socket.create_connection(address, timeout=HELLO_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"node 0 does not answer at --dist-init-addr {host}:{port}: "
                    f"{error.strerror or error}"
                ) from error
            if not is_logged:
                is_logged = True
                logger.info("waiting for node 0 at %s:%d (%s)", host, port, error.strerror or error)
        time.sleep(RETRY_S)


def _resolve(host: str, port: int) -> tuple[Any, ...]:
    try:
        infos = socket.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--dist-init-addr {host}: no IPv4 address is known by that name ({error})"
        ) from error
    ip = infos[0][4][0]
    if not is_interface(str(ip)):
        raise ConfigError(
            f"--dist-init-addr {host} is {ip}, but must be the IPv4 address or name of one "
            "interface: of node 0's towards the others"
        )
    return infos[0][4]
