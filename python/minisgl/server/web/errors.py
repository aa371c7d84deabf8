"""Turns every error into an error object, and installs the handlers that answer with it.

::

    {"error": {"message": a sentence, "type": kind, "param": the field or null, "code": code}}

`error_body` makes this object from exceptions of handlers, unknown paths and bugs of the server, so
a client needs one way to read errors. In a stream that has begun, the object is the last event. The
APIs of other vendors have the same content in those vendors' forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minisgl import plugins
from minisgl.errors import EngineError, InvalidRequest, RequestError
from minisgl.server.errors import refusal
from minisgl.server.observe import Observer
from minisgl.server.strict import Json
from minisgl.utils.text import shortened

MAX_READ: Final = 65
"""Characters of an unknown path that are compared; ours have fewer."""

MAX_SAID: Final = 1000
"""The most characters of an error about a request, which may quote what was sent."""


class ErrorObject(Json, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Json, frozen=True, kw_only=True):
    error: ErrorObject


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Return the HTTP status and the object for `error`. An exception of another kind is a bug."""
    param: str | None = None
    if isinstance(error, RequestError):
        status, code, param = error.status, error.code, error.param
        message, param = shortened(error.message, MAX_SAID), param and shortened(param, MAX_SAID)
    elif isinstance(error, EngineError):
        status, message, code = error.status, str(error), error.code
    else:
        status, code = 500, "internal_error"
        message = f"the server made a mistake ({type(error).__name__}); its log has the details"
    return status, ErrorBody(
        error=ErrorObject(message=message, type=_kind(status), param=param, code=code)
    )


def _kind(status: int) -> str:
    """Return OpenAI's `error.type` for an HTTP status."""
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def error_response(error: Exception, path: str) -> Response:
    """Return the response for `error` in the form of the API that `path` belongs to.

    With 429, 503 and 504, Retry-After is the error's `retry_after_s`, or 1 second.
    """
    status, body = error_body(error)
    headers = {}
    if status in (429, 503, 504):
        headers["Retry-After"] = str(math.ceil(getattr(error, "retry_after_s", 1)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(in_form_of(path, body)),
        status,
        headers=headers,
        media_type="application/json",
    )


ErrorForm = Callable[[ErrorBody], msgspec.Struct]
"""A row of the table `error_forms`: an error in another vendor's form. The row's name begins the
paths of that vendor's API."""


@cache
def _forms() -> Mapping[str, ErrorForm]:
    return {row.name: row.load() for row in plugins.rows("error_forms")}


def in_form_of(path: str, body: ErrorBody) -> msgspec.Struct:
    """Return `body` in the form of the API at `path`: of a row, else OpenAI's."""
    forms = (form for prefix, form in _forms().items() if path.startswith(prefix))
    form = next(forms, None)
    return form(body) if form else body


def client_left() -> Response:
    """Return the response to a client that has left, with nginx's status for that."""
    return Response(status_code=499)


def install(app: FastAPI, observer: Observer) -> None:
    """Let `app` answer every exception with an error object."""

    async def answer(request: Request, error: Exception) -> Response:
        observer.answered(error_body(error)[1].error.code)
        return error_response(error, request.url.path)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = await answer(request, _routing_error(request, error))
        response.headers.update(error.headers or {})
        return response

    async def answer_client_gone(request: Request, error: Exception) -> Response:
        return client_left()

    handlers: tuple[tuple[type[Exception], Any], ...] = (
        (RequestError, answer),
        (EngineError, answer),
        (HTTPException, answer_http),
        (ClientDisconnect, answer_client_gone),  # while its body was read
        (Exception, answer),
    )
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)


def _nearby(request: Request) -> str:
    """Return the path that was probably meant, if /v1 is missing or comes twice, or for a slip of
    the pen; else ""."""
    path = request.url.path.rstrip("/").removeprefix("/v1/v1").removeprefix("/v1")
    known = request.app.openapi()["paths"]
    meant = [name for name in (f"/v1{path}", path) if path and name in known]
    alike = get_close_matches(request.url.path[:MAX_READ], known, 1, 0.9)
    return next(iter(meant + alike), "")


def _routing_error(request: Request, error: HTTPException) -> InvalidRequest:
    path, method = shortened(request.url.path, 120), request.method
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        text = f"{path} does not take {method}, it takes {allowed}"
        return refusal(text, status=405, code="method_not_allowed")
    if error.status_code == 404:
        near = _nearby(request)
        hint = f"did you mean {near}?" if near else "/docs lists all paths"
        return refusal(f"there is nothing at {path}; {hint}", status=404, code="not_found")
    return refusal(str(error.detail), status=error.status_code, code="http_error")
