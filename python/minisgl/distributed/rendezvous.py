"""Where the ranks find each other: a store of torch's, named by one string.

    file:///PATH      a file that all ranks can open (one machine); it must not exist before
    tcp://HOST:PORT   rank 0 listens there, on that address alone

A process group built directly on such a store is nobody else's: the global group of the user's
program (`torch.distributed.init_process_group`) is neither needed nor touched.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

# Documented, but not among the names that torch exports for type checkers.
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from minisgl.distributed.communicator import DistributedInfo
from minisgl.errors import ConfigError, EngineError

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for another. One that has died is noticed at once, by its closed
connection; this must cover one that is slow: it reads its weights, or compiles its kernels."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store, and the address of this machine at which the other ranks reach this one."""

    store: Store
    address: str


def meet(info: DistributedInfo, url: str) -> Rendezvous:
    """Open the store at `url`; over TCP this waits for rank 0 to listen, up to `TIMEOUT`.

    Raises ConfigError when the url is none of the two kinds, EngineError when nobody answers.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        store: Store = FileStore(parts.path, info.size)
        store.set_timeout(TIMEOUT)
        return Rendezvous(store, LOOPBACK)
    host, port = parts.hostname, _port(url)
    if parts.scheme != "tcp" or host is None or port is None:
        raise ConfigError(f"ranks meet at file:///PATH or tcp://HOST:PORT, not at {url!r}")
    try:
        return Rendezvous(_tcp_store(info, host, port), _address_towards(host, port))
    except (RuntimeError, OSError) as error:  # torch's DistNetworkError is a RuntimeError
        raise EngineError(f"rank {info.rank} cannot meet the others at {url}: {error}") from error


def _port(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        return None


def _tcp_store(info: DistributedInfo, host: str, port: int) -> TCPStore:
    listener = None
    if info.rank == 0:
        # torch would listen on every interface; the socket that it is given is bound to one.
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
        listener = bound.detach()  # the store's from here
    return TCPStore(
        host,
        port,
        world_size=info.size,
        is_master=info.rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _address_towards(host: str, port: int) -> str:
    """The address of the interface that leads to `host`: asked of the routing table."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
