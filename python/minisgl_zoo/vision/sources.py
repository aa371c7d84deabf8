"""The file of a picture: in a data: URL, in a folder of the server, or on the web.

A server that fetches what clients name can be made to ask its own network. So each address is
resolved once, checked, and connected to; a redirect is checked like the first URL.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urljoin, urlsplit

from minisgl.core.image import Media
from minisgl.errors import InvalidRequest

MAX_BYTES: Final = 16 * 2**20
"""Of a file: the bound of a request's body, which holds the others."""

FETCH_S: Final = 10.0
"""The longest time of one picture on the web, redirects and all, after its name is resolved."""

MAX_REDIRECTS: Final = 3
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class Unusable(Exception):
    """The text says what is wrong with a URL."""


def source_of(part: Any, where: str, media: Media) -> str | None:
    """Return a picture's file in base64; None if the part is no image. Raises InvalidRequest."""
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
            return _encoded(fetched(url))
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
    except (OSError, ValueError):
        pass
    raise Unusable(f"is no file of at most {MAX_BYTES:,} bytes below --allowed-media-folder")


def fetched(url: str) -> bytes:
    """Return a file of the web. Raises Unusable."""
    end = time.monotonic() + FETCH_S
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
    port = parts.port or (443 if is_tls else 80)
    address = checked_address(host, port)
    links = [socket.create_connection((address, port), timeout=_left(end))]

    def stop() -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(links[-1], socket.SHUT_RDWR)

    # A timeout of the socket is for one packet. This ends the whole, however slowly it drips.
    timer = threading.Timer(_left(end), stop)
    timer.daemon = True
    timer.start()
    try:
        with closing(http.client.HTTPConnection(host, port)) as connection:
            if is_tls:
                context = ssl.create_default_context()
                links.append(context.wrap_socket(links[0], server_hostname=host))
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
                raise TimeoutError(f"it takes more than {FETCH_S:g} s")
            return body
    finally:
        timer.cancel()
        for link in links:
            link.close()


def checked_address(host: str, port: int) -> str:
    """Return an address of the host. Raises Unusable unless all are public."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not all(map(is_public, found)):
        raise Unusable("has a private address, which this server does not ask")
    return found[0]


def is_public(text: str) -> bool:
    """Return whether an address is one of the internet's, and hides no other one inside."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = (address.ipv4_mapped, address.sixtofour, address.teredo)
        if any(inner) or address in _NAT64:
            return False
    return address.is_global and not address.is_multicast


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
