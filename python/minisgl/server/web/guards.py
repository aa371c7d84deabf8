"""What stands before an application: the guard of browsers, and the ids of requests.

`BrowserGuard` refuses what web pages of other sites ask the server for. A server without keys
trusts whoever can connect, and each page in a browser of that machine can. Two checks stop such
pages. They read headers that a browser lets no page set:

    Origin, Sec-Fetch-Site   which page asks. Only the server's own pages may, and those that
                             `--cors-origin` names. Other clients send neither header.
    Host                     by which name the server is asked. A page can let its own name lead to
                             127.0.0.1 (DNS rebinding); the browser then takes the server for the
                             page's own site, but the name is in Host. With API keys this check is
                             left out: such a page has no key.

Sources: the Fetch Standard, "Forbidden request-header"; W3C, "Fetch Metadata Request Headers".
"""

from __future__ import annotations

import ipaddress
import re
import string
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import RequestError
from minisgl.server.args import listed
from minisgl.server.errors import refusal
from minisgl.server.web.errors import error_response
from minisgl.utils.logger import get_logger
from minisgl.utils.text import brief

logger = get_logger(__name__)

VIA: Final = "1.1 minisgl-router"
"""The header Via of a router's requests, which a browser lets no page set either. A router checks
its own name, and may ask its servers by any name."""

PAGES: Final = frozenset(("/", "/docs"))
"""Paths that a link on another site may open in a tab of its own."""

MAX_TOLD: Final = 16
"""The most refusals that are logged. They are alike, and a page may cause any number."""

_HOST: Final = re.compile(r"\[?([^\[\]]*?)\]?(?::\d*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What may come in through a browser.

    origins: of the pages that may use the server (`--cors-origin`); "*" is all. host: `--host`.
    names: further names of the server (`--allowed-host`), in lower case; "*" is all. If there are
    some, names are checked with API keys, too.
    """

    origins: tuple[str, ...] = ()
    host: str = ""
    names: tuple[str, ...] = ()


def door_of(host: str, cors_origin: str | None, allowed_host: str | None) -> Door:
    """Return the door that the options of these names ask for."""
    origins, names = listed((cors_origin or "").lower()), listed((allowed_host or "").lower())
    return Door(origins=origins, host=host.lower(), names=names)


def behind(
    door: Door, app: ASGIApp, has_keys: Callable[[], bool], count: Callable[[str], object]
) -> ASGIApp:
    """Return `app` behind a `BrowserGuard`. Pages of `door.origins` may read its answers (CORS).

    has_keys: whether clients need an API key. count: called with the code of each refusal.
    """
    if door.origins:
        app = CORSMiddleware(
            app,
            allow_origins=door.origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After", "X-Minisgl-Warning"),
        )
    return BrowserGuard(app, door, has_keys, count)


class BrowserGuard:
    """Answers requests of foreign pages, and those by a foreign name, with 403.

    It logs the first `MAX_TOLD` of them, because a client may not show the answer. Mutable: it
    keeps what it has logged.
    """

    def __init__(
        self, app: ASGIApp, door: Door, has_keys: Callable[[], bool], count: Callable[[str], object]
    ) -> None:
        self._app, self._door, self._has_keys, self._count = app, door, has_keys, count
        self._told: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check_name(headers)
                self._check_page(scope, headers)
            except RequestError as error:
                self._count(error.code)
                if error.message not in self._told and len(self._told) < MAX_TOLD:
                    self._told.add(error.message)
                    logger.warning("refused: %s", error.message)
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_name(self, headers: Headers) -> None:
        """Raise InvalidRequest if the server is asked by a name that is not its own."""
        names = self._door.names
        if "*" in names or (self._has_keys() and not names) or _is_of_router(headers):
            return
        for host in headers.getlist("host"):
            if not self._is_own(host):
                raise refusal(
                    f"this server does not have the name {brief(host)}: it answers requests for "
                    "localhost, an IP address, --host and --allowed-host, because a web page could "
                    "let any other name lead here. If the name is right, start the server with "
                    "--allowed-host and the name without the port",
                    status=403,
                    code="unknown_host",
                )

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        name = found[1].lower().removesuffix(".") if found else ""
        known = ("localhost", self._door.host, *self._door.names)
        if name and (name in known or name.endswith(".localhost")):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _check_page(self, scope: Scope, headers: Headers) -> None:
        """Raise InvalidRequest if a page of another origin asks."""
        site = headers.get("sec-fetch-site", "")
        if "*" in self._door.origins or site == "same-origin":
            return
        hosts = [host.lower() for host in headers.getlist("host")]
        # A proxy may speak HTTPS for this server, so either scheme is right.
        allowed = {f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts}
        allowed.update(self._door.origins)
        origins = headers.getlist("origin")
        foreign = [origin for origin in origins if origin.lower() not in allowed]
        if foreign:
            by = f"of {brief(foreign[0])}"
        elif not origins and site not in ("", "none") and not _opens_page(scope, headers):
            by = f"of another origin (Sec-Fetch-Site: {brief(site)})"
        else:
            return
        raise refusal(
            f"a web page {by} may not use this server. If it should, start the server with "
            "--cors-origin and the origin of the page. If it is the server's own page behind a "
            "proxy, let the proxy pass the header Host on",
            status=403,
            code="foreign_page",
        )


def _is_of_router(headers: Headers) -> bool:
    hops = ",".join(headers.getlist("via")).split(",")
    return any(hop.strip() == VIA for hop in hops)


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """Return whether the user follows a link to one of `PAGES`. The page with the link cannot read
    it, and cannot frame it."""
    how = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    is_visit = how == ("navigate", "document")
    return is_visit and scope["method"] == "GET" and scope["path"] in PAGES


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
