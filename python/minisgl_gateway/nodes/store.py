"""Where the ranks of several machines meet: torch's store at tcp://HOST:PORT."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from urllib.parse import urlsplit

# Documented, but not among the names that torch exports for type checkers.
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported from C++

from minisgl.distributed.communicator import DistributedInfo
from minisgl.distributed.gloo import TIMEOUT, Rendezvous, no_meeting_place
from minisgl.errors import ConfigError, PeerLost

ANSWER_TIMEOUT = timedelta(seconds=20)
"""How long a rank waits for a store's answer. If the listener never answers at all, torch waits
without limit, until rank 0's `TIMEOUT` ends the start."""
CONNECT_S = 2.0
RETRY_S = 0.2
Address = tuple[str, int]


def meet_over_tcp(info: DistributedInfo, url: str) -> Rendezvous:
    """Open the store at `url`, where rank 0 listens, on that address alone. Wait for it up to
    `TIMEOUT`.

    Raises ConfigError if the URL has another form, its host is unknown or rank 0 cannot listen
    there; PeerLost if rank 0 does not answer, or another program does.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise no_meeting_place(url)
    try:
        family, *_, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        own_address = _address_towards(host, port)
    except OSError as error:
        raise ConfigError(f"ranks cannot meet at {url}: {error}") from error
    address = (str(resolved[0]), port)
    store = _serve(family, address, info.size, url) if info.rank == 0 else _join(address, info, url)
    return Rendezvous(store, own_address)


def _serve(family: int, address: Address, size: int, url: str) -> TCPStore:
    """Return rank 0's store. torch would listen on every interface, so it gets our listener."""
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
    """Connect to rank 0's store.

    This waits for a listener before it calls torch, which writes its C++ stack to stderr for every
    attempt that fails.
    """
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while True:
        try:
            socket.create_connection(address, timeout=CONNECT_S).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {info.rank} cannot reach rank 0 at {url} "
                    f"({error.strerror or error}): has rank 0 ended, or does a firewall block the "
                    "port?"
                ) from error
        time.sleep(RETRY_S)
    try:
        store = _tcp_store(address, info.size, ANSWER_TIMEOUT)
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise PeerLost(
            f"rank {info.rank} reaches {url}, but rank 0 does not answer there ({error}): has it "
            "ended, or does another program listen there?"
        ) from error
    store.set_timeout(TIMEOUT)
    return store


def _tcp_store(
    address: Address, size: int, timeout: timedelta, listener: int | None = None
) -> TCPStore:
    """listener: rank 0's listening socket as a descriptor; the store takes it over."""
    return TCPStore(
        *address,
        world_size=size,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _address_towards(host: str, port: int) -> str:
    """Return the address of the interface that leads to `host`, from the routing table."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
