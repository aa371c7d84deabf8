"""The web pages: a chat with the model at `/`, the API's schema at `/docs`.

They are static files, and ordinary clients of the HTTP API. None is generated, and none comes from
another host. The policy in `_HEADERS` lets the pages run no other script and reach no other host,
even if an answer of the model contains one.

What it does not know: requests, models, the engine. Read next: static/main.js, static/docs.js.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from minisgl.server.site import Routes, Site

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser asks at each visit, and is answered with 304
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A static file. tag: changes with its content."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str


@cache
def _files() -> dict[str, _File]:
    """Return the static files, compressed, by their path below /page."""
    found = {}
    root = files(__package__) / "static"
    for folder, prefix in ((root, ""), (root / "vendor", "vendor/")):
        for entry in folder.iterdir():
            kind = _TYPES.get(entry.name.rpartition(".")[2])
            if kind and entry.is_file():
                plain = entry.read_bytes()
                found[prefix + entry.name] = _File(
                    kind=kind,
                    plain=plain,
                    packed=gzip.compress(plain, 9, mtime=0),
                    tag=f'"{hashlib.sha256(plain).hexdigest()[:20]}"',
                )
    return found


def router(site: Site) -> APIRouter:
    """Return the routes of the page, which are in no schema."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def index(request: Request) -> Response:
        return _send(request, "index.html")

    @routes.get("/docs")
    async def docs(request: Request) -> Response:
        return _send(request, "docs.html")

    @routes.get("/page/{path:path}")
    async def static(request: Request, path: str) -> Response:
        return _send(request, path)

    return routes


def _send(request: Request, path: str) -> Response:
    file = _files().get(path)
    if file is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.plain, headers=headers, media_type=file.kind)
    headers["Content-Encoding"] = "gzip"
    return Response(file.packed, headers=headers, media_type=file.kind)


ROUTES: Final = Routes(router)
