"""What a server and its successor tell each other, on a private pair of sockets.

The two may be of different versions. So the frames with the engine's records, which are strict, are
only sent between equal ones; the other records keep their form.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Final, Self

import msgspec

_LENGTH: Final = struct.Struct("<I")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What two servers compare. digest: of weights, version and settings, with which answers are
    the same (`ReplicaState.digest`). names: of the model. is_plain: connections have no
    encryption."""

    version: str
    digest: str
    names: list[str]
    is_plain: bool


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The successor accepts connections."""

    identity: Identity


class NotStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The successor could not start. why: a sentence."""

    why: str


class Records(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A list of the engine's records, as MessagePack: messages to the successor, replies back."""

    data: bytes


Record = Ready | NotStarted | Records
_DECODER: Final = msgspec.msgpack.Decoder(Record)


def packed(record: Record) -> bytes:
    """Return the frame of a record."""
    data = msgspec.msgpack.encode(record)
    return _LENGTH.pack(len(data)) + data


class Link:
    """One end of the connection. Mutable."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def of(cls, connected: socket.socket) -> Self:
        return cls(*await asyncio.open_unix_connection(sock=connected))

    def send(self, record: Record) -> None:
        """Send a record, or nothing if the other end has gone."""
        if not self._writer.is_closing():
            self._writer.write(packed(record))

    def put(self, records: Sequence[msgspec.Struct]) -> None:
        """Send the engine's records, as a `PushQueue` does."""
        self.send(Records(data=msgspec.msgpack.encode(records)))

    async def receive(self) -> Record | None:
        """Return the next record; None if the other end has gone, or sends what is none."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            record: Record = _DECODER.decode(await self._reader.readexactly(length))
            return record
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            return None

    def close(self) -> None:
        self._writer.close()
