"""Gives each HTTP response an X-Request-Id."""

from __future__ import annotations

import string
import uuid
from collections import Counter
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "-_.:/+=@")


class RequestIds:
    """The outermost application: it keeps a request's valid X-Request-Id, or makes one.

    It logs exceptions that FastAPI has answered and raises again, because uvicorn would close the
    connection on them. It passes HEAD on as GET; uvicorn leaves the body out. open_ids: it counts
    the ids of open requests there.
    """

    def __init__(self, app: ASGIApp, open_ids: Counter[str]) -> None:
        self._app, self._open_ids = app, open_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _is_valid(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._open_ids[request_id] += 1
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s met a bug of the server", request_id)
        finally:
            self._open_ids[request_id] -= 1
            if not self._open_ids[request_id]:
                del self._open_ids[request_id]


def _is_valid(request_id: str) -> bool:
    return 0 < len(request_id) <= 128 and _CHARACTERS.issuperset(request_id)
