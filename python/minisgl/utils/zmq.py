"""Typed queues between the processes of one server: lists of records over ZeroMQ PUSH/PULL.

One frame is one MessagePack list, so the records of one turn of a loop travel together and are
decoded at once. Each receiver binds one address, and its senders connect to it. The sockets are in
a folder that only this user may enter. Each queue has its own ZeroMQ context (two sleeping
threads), so closing a queue affects no other.

This module knows no record: the receiver names the union of records that it accepts.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from minisgl.errors import ConfigError
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted

T = TypeVar("T")

logger = get_logger(__name__)

# sun_path of unix(7) holds 108 bytes with its terminating zero, 104 on the BSDs and macOS.
MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103

# The longest time that `close` waits until the last messages have reached a peer, which may be
# gone.
LINGER_S = 1.0

# The most records of one `get`, so that a receiver that is slower than its senders still works.
MAX_RECORDS_PER_GET = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The addresses of one server: sockets in a private folder, which no other server uses.

    store_url, broadcast_urls (by rank): TCP addresses, for ranks on several machines.
    """

    folder: Path
    store_url: str | None = None
    broadcast_urls: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def create(cls) -> Endpoints:
        """Make the folder (mode 0700), under TMPDIR if that is set.

        Raises ConfigError if the folder's name is too long for unix sockets, or cannot be made.
        """
        try:
            endpoints = cls(folder=Path(tempfile.mkdtemp(prefix="minisgl-")))
        except OSError as error:
            raise _no_place(tempfile.gettempdir(), error) from None
        longest = endpoints.tokenizer(9999).removeprefix("ipc://")
        if len(longest.encode()) > MAX_SOCKET_PATH_BYTES:
            endpoints.remove()
            raise ConfigError(
                f"the socket path {longest} has {len(longest.encode())} bytes, but unix sockets "
                f"allow {MAX_SOCKET_PATH_BYTES}: set TMPDIR to a folder with a shorter name"
            )
        return endpoints

    def remove(self) -> None:
        """Remove the folder and its contents. A second call does nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def tokenizer(self, index: int) -> str:
        return f"ipc://{self.folder}/tokenizer-{index}"

    @property
    def scheduler(self) -> str:
        return f"ipc://{self.folder}/scheduler"

    def broadcasts(self, rank: int) -> str:
        """Return the address at which another rank receives the broadcasts of rank 0."""
        return self.broadcast_urls.get(rank) or f"ipc://{self.folder}/broadcasts-{rank}"

    @property
    def store(self) -> str:
        """The address at which torch's process groups meet."""
        return self.store_url or f"file://{self.folder}/store"

    @property
    def detokenizer(self) -> str:
        return f"ipc://{self.folder}/detokenizer"

    @property
    def api(self) -> str:
        return f"ipc://{self.folder}/api"


def _no_place(where: str, error: OSError | zmq.ZMQError) -> ConfigError:
    return ConfigError(
        f"no socket can be made at {where}: {error.strerror}; make room there, or set TMPDIR to a "
        "folder on another disk"
    )


class PushQueue:
    """The sending end. Records wait, in order, until the receiver exists."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        # No limit on queued messages: `put` must not block a scheduler whose receiver is slow, and
        # the number of running requests bounds the messages.
        self._socket.set(zmq.SNDHWM, 0)
        # The receiver may bind later, and the default of 100 ms would make the start longer.
        self._socket.set(zmq.RECONNECT_IVL, 10)
        self._socket.connect(address)

    def put(self, records: Sequence[msgspec.Struct]) -> None:
        """Send `records` as one frame, and return at once. An empty list sends nothing."""
        if records:
            self._socket.send(msgspec.msgpack.encode(records), zmq.DONTWAIT)

    def close(self) -> None:
        """Send the queued records, for at most `LINGER_S`. A second call does nothing."""
        self._context.destroy(linger=int(LINGER_S * 1000))


class _Receiver(Generic[T]):
    """Binds `address` and accepts lists of `union`, decoded strictly.

    Raises ConfigError if the folder takes no more sockets.

    A frame that is not such a list is logged, counted in `num_dropped` and dropped.
    """

    def __init__(self, address: str, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[union])
        self._address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)  # as on the sending side
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            if address.startswith("ipc:"):
                raise _no_place(address.removeprefix("ipc://"), error) from None
            raise
        self.num_dropped = 0

    def close(self) -> None:
        """Unbind. Unread records are lost. A second call does nothing."""
        self._context.destroy(linger=0)

    def _drain(self) -> list[T]:
        """Return the records that have arrived. If there are none, the socket is empty."""
        records: list[T] = []
        while len(records) < MAX_RECORDS_PER_GET:
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                records += self._decoder.decode(frame)
            except Exception as error:  # no message may end the worker
                self.num_dropped += 1
                logger.error(
                    "dropped a message of %s at %s: %s",
                    counted(len(frame), "byte"),
                    self._address,
                    error,
                )
        return records


class PullQueue(_Receiver[T]):
    """The receiving end in a process that blocks."""

    def get(self, timeout_s: float | None) -> list[T]:
        """Return all records that have arrived. Wait up to `timeout_s` for the first (None:
        forever).

        Empty after that time, or if all frames that came were dropped.
        """
        if (records := self._drain()) or timeout_s == 0:
            return records
        self._socket.poll(_milliseconds(timeout_s))
        return self._drain()


class AsyncPullQueue(_Receiver[T]):
    """The receiving end in a process with an event loop. One task at a time may wait on it."""

    async def get(self) -> list[T]:
        """Return all records that have arrived, at least one. Other tasks run before it returns."""
        # A queue that always has records must not block the other tasks.
        await asyncio.sleep(0)
        while not (records := self._drain()):
            await self._news()
        return records

    async def _news(self) -> None:
        """Wait for the socket's descriptor.

        It is edge-triggered: it reports only frames that came after the last read. So the socket
        must be empty before, as `_drain` leaves it.
        """
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        descriptor = self._socket.fileno()
        loop.add_reader(descriptor, news.set)
        try:
            await news.wait()
        finally:
            loop.remove_reader(descriptor)


def wait(
    queues: Sequence[PullQueue[Any]], timeout_s: float | None, *, news: int
) -> list[PullQueue[Any]]:
    """Return the queues that may have records. Wait up to `timeout_s` for the first, or until the
    file descriptor `news` is readable."""
    poller = zmq.Poller()
    poller.register(news, zmq.POLLIN)
    for queue in queues:
        poller.register(queue._socket, zmq.POLLIN)
    ready = dict(poller.poll(_milliseconds(timeout_s)))
    return [queue for queue in queues if queue._socket in ready]


def _milliseconds(timeout_s: float | None) -> int:
    """Return the time in ZeroMQ's unit, rounded up: a wait of 0 would spin. None: forever."""
    return -1 if timeout_s is None else math.ceil(timeout_s * 1000)
