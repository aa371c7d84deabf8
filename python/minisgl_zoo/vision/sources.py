"""The file of a picture: in a data: URL, in a folder of the server, or on the web.

A server that fetches what clients name can be made to ask its own network. So each address is
resolved once, checked, and connected to; a redirect is checked like the first URL.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final
from urllib.parse import unquote, urljoin, urlsplit

from minisgl.core.image import Media
from minisgl.errors import InvalidRequest
from minisgl_zoo.vision.lately import KEPT_BYTES, Lately

MAX_BYTES: Final = 16 * 2**20
"""Of a file: the bound of a request's body, which holds the others."""

FETCH_S: Final = 10.0
"""The longest time of one picture on the web, with its name's lookup, redirects and all."""

FETCHES_S: Final = 30.0
"""Of all pictures of a request, since others wait for the thread."""

MAX_REDIRECTS: Final = 3
_TOO_LONG: Final = (
    f"one picture may take {FETCH_S:g} s, and all of a request together {FETCHES_S:g} s"
)
_UNICAST: Final = ipaddress.ip_network("2000::/3")
"""The IPv6 addresses that IANA gives away. Others have IPv4 addresses inside (mapped, compatible,
NAT64) or are of one network."""


class Unusable(Exception):
    """The text says what is wrong with a URL."""


class Web:
    """The web's pictures. Mutable: it keeps those of the last `FETCH_S`, because a router asks for
    a prompt's ids before it passes the prompt on."""

    def __init__(self) -> None:
        self._lately: Lately[tuple[float, str]] = Lately(KEPT_BYTES)

    def file(self, url: str, end: float) -> str:
        """Return a file in base64. end: of `time.monotonic`, when it must be here. Raises
        Unusable."""
        now = time.monotonic()
        since, data = self._lately.get(url) or (-math.inf, "")
        if now - since > FETCH_S:
            data = _encoded(fetched(url, min(end, now + FETCH_S)))
            self._lately.put(url, (time.monotonic(), data), len(data))
        return data


def source_of(part: Any, where: str, media: Media, fetch: Callable[[str], str]) -> str | None:
    """Return a picture's file in base64; None if the part is no image. fetch: returns that of a
    URL of the web. Raises InvalidRequest."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            pass
        case {"type": "image_url"}:
            raise InvalidRequest(
                f'{where} must be {{"type": "image_url", "image_url": {{"url": "data:..."}}}}',
                param=where,
            )
        case _:
            return None
    where = f"{where}.image_url.url"
    scheme = url.partition(":")[0].lower()
    try:
        if scheme == "file" and media.folder:
            return _encoded(_of_folder(url, Path(media.folder)))
        if scheme in ("http", "https") and media.fetches:
            return fetch(url)
        return _of_data(url)
    except Unusable as error:
        raise InvalidRequest(f"{where} {error}", param=where) from None


def _of_data(url: str) -> str:
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise Unusable(
            "must be a data: URL with base64, like data:image/png;base64,iVBORw0...; file: and "
            "http(s): URLs need a server with --allowed-media-folder and --allow-image-urls"
        )
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unusable(f"is no valid base64: {error}") from None
    return data


def _of_folder(url: str, folder: Path) -> bytes:
    """Return a file below the folder. One error for all others, which tells nothing of them."""
    folder = folder.expanduser().resolve()
    try:
        path = Path(unquote(urlsplit(url).path)).resolve(strict=True)
        if path.is_relative_to(folder) and path.is_file() and path.stat().st_size <= MAX_BYTES:
            return path.read_bytes()
    except (OSError, ValueError, RuntimeError):  # of a ring of links
        pass
    raise Unusable(f"is no file of at most {MAX_BYTES:,} bytes below --allowed-media-folder")


def fetched(url: str, end: float) -> bytes:
    """Return a file of the web. Raises Unusable."""
    for _ in range(1 + MAX_REDIRECTS):
        try:
            found = _get(url, end)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unusable(f"cannot be fetched: {error or type(error).__name__}") from None
    raise Unusable(f"has more than {MAX_REDIRECTS} redirects")


def _get(url: str, end: float) -> bytes | str:
    """Return a body, or where it was redirected to."""
    parts = urlsplit(url)
    host, is_tls = parts.hostname, parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise Unusable("must be an http(s): URL without a user, and so must redirects")
    port = (443 if is_tls else 80) if parts.port is None else parts.port
    address = checked_address(host, port, end)
    links = [socket.create_connection((address, port), timeout=_left(end))]

    def stop() -> None:
        with suppress(OSError):
            socket.socket.shutdown(links[-1], socket.SHUT_RDWR)

    # A timeout of the socket is for one packet. This ends the whole, however slowly it drips.
    timer = threading.Timer(_left(end), stop)
    timer.daemon = True
    timer.start()
    try:
        with closing(http.client.HTTPConnection(host, port)) as connection:
            if is_tls:
                context = ssl.create_default_context()
                wrapped = context.wrap_socket(
                    links[0], server_hostname=host, do_handshake_on_connect=False
                )
                links.append(wrapped)  # for `stop`, before the handshake
                wrapped.do_handshake()
            connection.sock = links[-1]
            path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
            connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "minisgl"})
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308) and (to := answer.getheader("Location")):
                return to
            if answer.status != 200:
                raise Unusable(f"is answered with HTTP {answer.status}")
            body = answer.read(MAX_BYTES + 1)
            if len(body) > MAX_BYTES:
                raise Unusable(f"has more than {MAX_BYTES:,} bytes")
            if time.monotonic() >= end:
                raise TimeoutError(_TOO_LONG)
            return body
    finally:
        timer.cancel()
        for link in links:
            link.close()


def checked_address(host: str, port: int, end: float) -> str:
    """Return an address of the host. Raises Unusable unless all are public."""
    found = [str(info[4][0]) for info in _looked_up(host, port, end)]
    if not all(map(is_public, found)):
        raise Unusable("has a private address, which this server does not ask")
    return found[0]


def _looked_up(host: str, port: int, end: float) -> list[Any]:
    """Return what getaddrinfo does, which takes no timeout: a thread waits for it. A resolver gives
    up within a minute by default, so few such threads wait at a time."""
    answers: SimpleQueue[Any] = SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:  # no such name, or no name
            answers.put(error)

    threading.Thread(target=look_up, name="lookup", daemon=True).start()
    try:
        answer = answers.get(timeout=_left(end))
    except Empty:
        raise TimeoutError(f"its name is not resolved; {_TOO_LONG}") from None
    if isinstance(answer, Exception):
        raise answer
    found: list[Any] = answer
    return found


def is_public(text: str) -> bool:
    """Return whether an address is one of the internet's, and hides no other one inside."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _UNICAST or address.sixtofour or address.teredo
    ):
        return False
    return address.is_global and not address.is_multicast


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
