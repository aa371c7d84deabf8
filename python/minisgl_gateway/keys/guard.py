"""Passes on only requests with a key: `Authorization: Bearer KEY` or `x-api-key: KEY`."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import RequestError
from minisgl.server.errors import refusal
from minisgl.server.observe import Observer
from minisgl.server.web.errors import error_response
from minisgl_gateway.keys.ring import Key, KeyRing
from minisgl_gateway.lora import ADAPTER_PATHS
from minisgl_gateway.watch.replica import PREFIX_HEADER, PROMPT_PATHS

OPEN: Final = frozenset(("/", "/docs", "/favicon.ico", "/health", "/ready"))
"""Paths without a key: probes have none, and the web pages ask their user for one."""

OPEN_BELOW: Final = "/page/"
"""The path of the page's files, which need no key."""

ADMIN: Final = frozenset(
    ("/start_profile", "/stop_profile", "/xray/events", "/replica", *ADAPTER_PATHS)
)
"""Paths that need a key with admin rights: profiles slow the server down and write files, the X-ray
shows the requests of all keys, the state of a replica has hashes of their prompts, and adapters
change what names of models mean."""


class KeyGuard:
    """Answers requests without a valid key with 401, and those above a key's limits with 429.

    It sets `scope["api_key"]` to the key of a request that passes. Only POST counts against the
    limit of requests; a router's request for a prompt's hashes (`PREFIX_HEADER`) does not. Other
    paths do not know that header.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, observer: Observer) -> None:
        self._app = app
        self._keys = keys
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in OPEN and not path.startswith(OPEN_BELOW):
            try:
                scope["api_key"] = self._admit(scope, path)
            except RequestError as error:
                self._observer.answered(error.code)
                await error_response(error, path)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope, path: str) -> Key:
        headers = Headers(scope=scope)
        given = key_given(headers)
        if not given:
            raise refusal(
                "this server needs an API key: send the header 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'",
                status=401,
                code="invalid_api_key",
            )
        key = self._keys.find(given)
        if key is None:
            raise refusal(
                "this server does not know the API key", status=401, code="invalid_api_key"
            )
        if path in ADMIN:
            if not key.is_admin:
                raise refusal(
                    f"{path} needs a key with admin rights, and {key.name!r} has none",
                    status=403,
                    code="not_permitted",
                )
        elif scope["method"] == "POST":
            key.admit(counts=PREFIX_HEADER not in headers or path not in PROMPT_PATHS)
        return key


def key_given(headers: Headers) -> str:
    """Return the text of a request's key; "" if it has none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
