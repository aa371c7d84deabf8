"""Several machines: node 0 serves, each other node runs its ranks of node 0's engine.

::

    node 0   listen | <-- Hello, Accepted --> | Welcome --> | start ranks | serve      | Gone -->
    node r   connect until it does            |             | start ranks | watch them | end

Each node's supervisor has one TCP connection to node 0's. After the start nothing is said there
but `Gone`, by whoever ends; and the connection's own end says the same of one that could not: at
once when a process ends, after some seconds (`KEEPALIVE`) when a machine or a cable does. That is
why it is no ZeroMQ socket, which hides both. The ranks meet as on one machine, but over TCP::

    PORT        this connection          PORT + 1 + r   rank 0's beats, at the node of rank r
    PORT + 1    torch's store

Nothing is encrypted or authenticated: this is for networks whose every machine is trusted. All of
it is bound to the interface of `--dist-init-addr`, or of the route towards it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import msgspec

from minisgl import __version__, env
from minisgl.core.args import options_of
from minisgl.errors import ConfigError, EngineError
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.node_map import (
    beats_port,
    is_interface,
    ranks_of,
    split_address,
    store_port,
)
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted
from minisgl.utils.zmq import Endpoints

logger = get_logger(__name__)

JOIN_S: Final = 300.0  # people start nodes by hand, and checkpoints are fetched before
RETRY_S: Final = 0.3
HELLO_S: Final = 5.0  # a connection that says nothing for so long is none of ours
ANSWER_S: Final = 20.0  # node 0 answers at once, but for strangers that it waits `HELLO_S` for
MAX_BYTES: Final = 1 << 16  # of a record; the longest is a few kilobytes of settings
# Seconds of silence until the kernel asks, then between three questions: a cut cable is noticed
# after 5 s, and all has ended within 6 (scripts/try_two_nodes.sh).
KEEPALIVE: Final = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
TAIL_BYTES: Final = 1 << 16  # of each weight file, for the digest


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Record, frozen=True, kw_only=True):
    """From a node that wants to take part. settings: see `settings_of`."""

    node: int
    settings: dict[str, str]


class Accepted(_Record, frozen=True, kw_only=True):
    """To each as it comes: wait for the others, however long that takes."""


class Welcome(_Record, frozen=True, kw_only=True):
    """All nodes are here: start your ranks."""


class Refused(_Record, frozen=True, kw_only=True):
    message: str


class Gone(_Record, frozen=True, kw_only=True):
    """The sender ends. reason: None when this is what the user asked node 0 for."""

    reason: str | None


NodeMsg = Hello | Accepted | Welcome | Refused | Gone


class NodeLink:
    """The connection to another node's supervisor. Mutable: it can be closed."""

    def __init__(self, name: str, connected: socket.socket) -> None:
        self.name = name
        self.address = str(connected.getpeername()[0])
        self.own_address = str(connected.getsockname()[0])
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # macOS has none
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connected.settimeout(None)
        # Of each read; a record's first bytes without the others are no reason to wait for ever.
        limit = struct.pack("@ll", int(HELLO_S), int(HELLO_S % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.status = Connection(connected.detach())  # frames; nothing is ever pickled

    def send(self, record: NodeMsg) -> None:
        with contextlib.suppress(OSError):  # it is gone, which `receive` tells
            self.status.send_bytes(msgspec.msgpack.encode(record))

    def receive(self, timeout_s: float | None = None) -> NodeMsg:
        """Waits. Raises EngineError when the node is gone or says what it should not."""
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
        """To be asked when there is something to read. None: it ended as it was asked to."""
        try:
            said = self.receive(HELLO_S)
        except EngineError as error:
            return error
        if isinstance(said, Gone) and said.reason is None:
            return None
        return EngineError(f"{self.name} at {self.address}: {getattr(said, 'reason', said)}")

    def close(self) -> None:
        self.status.close()


def settings_of(args: RuntimeArgs, folder: Path) -> dict[str, str]:
    """What must be the same on all nodes, by the name that a person knows it by."""
    flags = {
        _flag(name): str(getattr(args, name))
        for name, (_, option) in options_of(type(args)).items()
        if option.nodes == "same"
    }
    return flags | {
        "the version of minisgl": __version__,
        "the version of torch": version("torch"),
        "MINISGL_DISABLE_OVERLAP_SCHEDULING": str(int(env.overlap_disabled())),
        "MINISGL_CHECK_PLANS": str(int(env.check_plans())),
        "MINISGL_CHECK_PAGES": str(int(env.check_pages())),
        "MINISGL_DISABLE_JIT": str(int(env.jit_disabled())),
        "the checkpoint": _digest(folder, weights=not args.dummy_weight),
    }


def given_of_node_0(args: RuntimeArgs) -> list[str]:
    """The flags among `args` that only node 0 uses, as they are typed."""
    return [
        _flag(name)
        for name, (default, option) in options_of(type(args)).items()
        if option.nodes == "first" and getattr(args, name) != default
    ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _digest(folder: Path, *, weights: bool) -> str:
    """Of the settings files whole, and of the weights' names, sizes and last bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        is_index = path.name.endswith(".safetensors.index.json")
        if path.suffix not in (".json", ".safetensors"):
            continue
        if not weights and (is_index or path.suffix == ".safetensors"):
            continue  # one node may have them, another not
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0 if path.suffix == ".json" else max(size - TAIL_BYTES, 0))
            digest.update(f"{path.name} {size} ".encode())
            digest.update(file.read())
    return digest.hexdigest()[:12]


def _difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """What differs, as a sentence; "" where nothing does."""
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if not names:
        return ""
    told = "; ".join(f"{n} is {theirs.get(n)} there, {ours.get(n)} on node 0" for n in names)
    return (
        f"{told}. All nodes must run the same version with the same flags, variables and checkpoint"
    )


def gather_nodes(args: RuntimeArgs, settings: dict[str, str]) -> list[NodeLink]:
    """Node 0: wait until all others are here, by node. Raises ConfigError if it cannot listen."""
    host, port = split_address(args)
    links: dict[int, NodeLink] = {}
    with _listening(host, port) as listener:
        _check_free(host, store_port(args))
        awaited = counted(args.nnodes - 1, "other node")
        logger.info("waiting for %s at %s:%d", awaited, host, port)
        while len(links) < args.nnodes - 1:
            ready = wait([listener, *(link.status for link in links.values())])
            for node, link in list(links.items()):
                if link.status in ready:  # before the start: it may come again
                    logger.warning("%s", link.death())
                    links.pop(node).close()
            if listener in ready:
                _admit(args, settings, listener.accept()[0], links)
    for link in links.values():
        link.send(Welcome())
    return [links[node] for node in sorted(links)]


def _admit(
    args: RuntimeArgs,
    settings: dict[str, str],
    connected: socket.socket,
    links: dict[int, NodeLink],
) -> None:
    """Put who has just connected among `links`, or refuse it with a sentence."""
    try:
        link = NodeLink("a node", connected)
        said = link.receive(HELLO_S)
    except (OSError, EngineError) as error:  # nobody to tell
        logger.warning("somebody connected, but is no node: %s", error)
        return
    awaited = sorted(set(range(1, args.nnodes)) - set(links))
    if not isinstance(said, Hello):
        refusal = "it does not say who it is"
    elif said.node not in awaited:
        refusal = f"--node-rank {said.node} is not awaited; awaited are {awaited}"
    elif not (refusal := _difference(settings, said.settings)):
        link.name = f"node {said.node}"
        links[said.node] = link
        link.send(Accepted())
        logger.info("%s is here, from %s", link.name, link.address)
        return
    logger.warning("refused a node at %s: %s", link.address, refusal)
    link.send(Refused(message=refusal))
    link.close()


def join_node_0(args: RuntimeArgs, settings: dict[str, str]) -> NodeLink:
    """Another node: wait for node 0, and for all the others.

    Raises ConfigError if refused or if its ranks' ports are taken, EngineError if node 0 ends.
    """
    host, port = split_address(args)
    link = NodeLink("node 0", _connect(host, port))
    try:
        for rank in ranks_of(args, args.node_rank):
            _check_free(link.own_address, beats_port(args, rank))
    except ConfigError:
        link.close()
        raise
    link.send(Hello(node=args.node_rank, settings=settings))
    try:
        said = link.receive(ANSWER_S)
    except EngineError as error:
        link.close()
        raise EngineError(
            f"what listens at --dist-init-addr {host}:{port} is not node 0, or node 0 has just "
            "ended; start node 0, then this node again, or choose another port, the same on all "
            "nodes"
        ) from error
    if isinstance(said, Accepted):
        logger.info("connected to %s:%d; waiting until all nodes are here", host, port)
        said = link.receive()
    if isinstance(said, Refused):
        link.close()
        raise ConfigError(f"node 0 refuses this node: {said.message}")
    if not isinstance(said, Welcome):
        raise EngineError(f"node 0 at {host}:{port} answers with {said}")
    return link


def with_network(endpoints: Endpoints, args: RuntimeArgs, links: list[NodeLink]) -> Endpoints:
    """The same, where what ranks on other nodes use is a TCP address. links: see `NodeLink`."""
    leader = links[0].own_address if args.node_rank == 0 else links[0].address
    beats: dict[int, str] = {}
    for node in range(1, args.nnodes):
        if args.node_rank in (0, node):  # others' addresses are of no use here
            at = links[node - 1].address if args.node_rank == 0 else links[0].own_address
            ports = {rank: beats_port(args, rank) for rank in ranks_of(args, node)}
            beats |= {rank: f"tcp://{at}:{port}" for rank, port in ports.items()}
    store_url = f"tcp://{leader}:{store_port(args)}"
    return dataclasses.replace(endpoints, store_url=store_url, beat_urls=beats)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server(_resolve(host, port))
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
    with listener:
        yield listener


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError if a rank of this node could not listen there: told before it starts."""
    with _listening(host, port):
        pass


def _connect(host: str, port: int) -> socket.socket:
    address = _resolve(host, port)
    deadline, told = time.monotonic() + JOIN_S, False
    while True:
        try:
            return socket.create_connection(address, timeout=HELLO_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"node 0 does not answer at --dist-init-addr {host}:{port}: "
                    f"{error.strerror or error}"
                ) from error
            if not told:
                told = True
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
