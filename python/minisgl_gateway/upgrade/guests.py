"""Requests of an old server that go on, or begin, in its successor's engine.

The client's connection stays with the old server, which makes the answer of the replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from minisgl.core import Failed, Finished
from minisgl.errors import EngineError
from minisgl.message import AbortMsg, RequestReply, TokenizeMsg
from minisgl.message.frontend import UserReply
from minisgl.server.call import Call, ClientGone
from minisgl.server.clients import Origin
from minisgl.server.frontend import Frontend
from minisgl.utils.logger import get_logger
from minisgl_gateway.upgrade.link import Link, Records

logger = get_logger(__name__)


class _Named(msgspec.Struct):
    """What most messages have."""

    uid: int | None = None


_LIST: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.msgpack.Decoder(TokenizeMsg | AbortMsg)
_NAMED: Final = msgspec.msgpack.Decoder(_Named)
_REPLIES: Final = msgspec.msgpack.Decoder(list[UserReply])


class Replies:
    """The old server's end of the link, as the queue of an engine's replies."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def get(self) -> list[UserReply]:
        """Return replies. Raises EngineError if the successor has gone."""
        record = await self._link.receive()
        if not isinstance(record, Records):
            raise EngineError("the server that took over has ended")
        return _REPLIES.decode(record.data)


class HostFrontend(Frontend):
    """A frontend that takes requests of an old server. Mutable."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        """parts, options: the arguments of `Frontend`."""
        super().__init__(*parts, **options)
        self._guests: dict[int, _Guest] = {}  # by the old server's uid

    async def host(self, link: Link) -> None:
        """Take the old server's requests until it has gone."""
        while isinstance(record := await link.receive(), Records):
            for data in _LIST.decode(record.data):
                self._take(data, link)
        for guest in list(self._guests.values()):
            guest.abort()

    def _take(self, data: msgspec.Raw, link: Link) -> None:
        try:
            message = _MESSAGE.decode(data)
        except msgspec.DecodeError as error:
            logger.error("a message of the server before this one is dropped: %s", error)
            if (uid := _NAMED.decode(data).uid) is not None:  # the code differs after all
                link.put([Failed.of(uid, EngineError("the new server does not know its form"))])
            return
        if isinstance(message, TokenizeMsg):
            self.adopt(message, link)
        elif guest := self._guests.get(message.uid):
            guest.abort()

    def adopt(self, message: TokenizeMsg, link: Link) -> int:
        """Let the old server's request go on here. Returns its uid."""
        uid = next(self._uids)
        guest = _Guest(uid, message.uid, link, self._abort, self._guests)
        try:
            self._check_failure()
            self._send([replace(message, uid=uid, context_length=self.context_length)])
        except EngineError as error:
            link.put([Failed.of(message.uid, error)])
            return uid
        self._calls[uid] = self._guests[message.uid] = guest
        self.observer.submitted([uid], Origin(), message.sampling, time.perf_counter())
        return uid


class _Guest(Call):
    """A request whose replies go to the old server. theirs: the uid there. guests: all of them, by
    that uid."""

    __slots__ = ("_guests", "_link", "_theirs")

    def __init__(
        self,
        uid: int,
        theirs: int,
        link: Link,
        abort: Callable[[list[int], Exception], None],
        guests: dict[int, _Guest],
    ) -> None:
        super().__init__([uid], abort)
        self._theirs, self._link, self._guests = theirs, link, guests

    def deliver(self, reply: RequestReply) -> None:
        self._link.put([replace(reply, uid=self._theirs)])
        if isinstance(reply, Finished | Failed):
            self._indices.clear()
            self._guests.pop(self._theirs, None)

    def fail(self, error: Exception) -> None:
        if self._indices and not isinstance(error, ClientGone):
            self._link.put([Failed.of(self._theirs, error)])
        self._guests.pop(self._theirs, None)
        super().fail(error)
