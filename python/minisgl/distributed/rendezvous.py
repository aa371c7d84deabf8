"""Where the ranks find each other: a store of torch's, named by one string.

    file:///PATH      a file that all ranks can open (one machine); it must not exist before
    tcp://HOST:PORT   rank 0 listens there, on that address alone

A process group built directly on such a store is nobody else's: the global group of the user's
program (`torch.distributed.init_process_group`) is neither needed nor touched.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

# Documented, but not among the names that torch exports for type checkers.
from torch.distributed import (  # type: ignore[attr-defined]  # exported from C++
    FileStore,
    Store,
    TCPStore,
)

from minisgl.distributed.communicator import DistributedInfo
from minisgl.errors import ConfigError, PeerLost

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for another. One that has died is noticed at once, by its closed
connection; this must cover one that is slow: it reads its weights, or compiles its kernels."""
ANSWER_TIMEOUT = timedelta(seconds=20)
"""For who listens to answer as a store does. One that says nothing at all torch waits for without
end, and rank 0's `TIMEOUT` ends that."""
CONNECT_S = 2.0
RETRY_S = 0.2
LOOPBACK = "127.0.0.1"
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store, and the address of this machine at which the other ranks reach this one."""

    store: Store
    address: str


def meet(info: DistributedInfo, url: str) -> Rendezvous:
    """Open the store at `url`; over TCP this waits for rank 0 to listen, up to `TIMEOUT`.

    Raises ConfigError when the url is none of the two kinds, its host is not known or rank 0 cannot
    listen there; PeerLost when nobody answers, or not rank 0.
    """
    if url.startswith("file:///"):  # any path: no character of it means something else
        store: Store = FileStore(url.removeprefix("file://"), info.size)
        store.set_timeout(TIMEOUT)
        return Rendezvous(store, LOOPBACK)
    parts = urlsplit(url)
    host, port = parts.hostname, _port(url)
    if parts.scheme != "tcp" or host is None or port is None:
        raise ConfigError(f"ranks meet at file:///PATH or tcp://HOST:PORT, not at {url!r}")
    try:
        family, *_, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        own_address = _address_towards(host, port)
    except OSError as error:
        raise ConfigError(f"ranks cannot meet at {url}: {error}") from error
    address = (str(resolved[0]), port)
    store = _serve(family, address, info.size, url) if info.rank == 0 else _join(address, info, url)
    return Rendezvous(store, own_address)


def _port(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        return None


def _serve(family: int, address: Address, size: int, url: str) -> TCPStore:
    """Rank 0's store. torch would listen on every interface, so it is given what listens on one."""
    try:
        listener = socket.create_server(address, family=family)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(
            f"rank 0 cannot listen at {url}, where the ranks meet: {why}; it must be an address of "
            "rank 0's machine, with a port that is free"
        ) from error
    return _tcp_store(address, size, TIMEOUT, listener=listener.detach())


def _join(address: Address, info: DistributedInfo, url: str) -> TCPStore:
    """Another rank's way to rank 0's store.

    torch is asked only when somebody listens: it would wait as well, but for every failure writes
    the stack of its C++ to stderr.
    """
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while True:
        try:
            socket.create_connection(address, timeout=CONNECT_S).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {info.rank} finds nobody at {url}, where rank 0 listens "
                    f"({error.strerror or error}): has that ended, or does a firewall close the "
                    "port?"
                ) from error
        time.sleep(RETRY_S)
    try:
        store = _tcp_store(address, info.size, ANSWER_TIMEOUT)
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise PeerLost(
            f"rank {info.rank} finds somebody at {url} who is not rank 0 ({error}): has that "
            "ended, or does another program listen there?"
        ) from error
    store.set_timeout(TIMEOUT)
    return store


def _tcp_store(
    address: Address, size: int, timeout: timedelta, listener: int | None = None
) -> TCPStore:
    """listener: of rank 0, a descriptor that is the store's from here."""
    return TCPStore(
        *address,
        world_size=size,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _address_towards(host: str, port: int) -> str:
    """The address of the interface that leads to `host`: asked of the routing table."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
