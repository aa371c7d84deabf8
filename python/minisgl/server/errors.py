"""Turns every error into OpenAI's error object.

::

    {"error": {"message": a sentence, "type": kind, "param": the field or null, "code": code}}

`error_body` makes this object from exceptions of handlers, unknown paths and bugs of the server, so
a client needs one way to read errors. In a stream that has begun, the object is the last event. The
APIs of other vendors have the same content in those vendors' forms.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minisgl.errors import EngineError, InvalidRequest, RequestError
from minisgl.server.api.schema import ErrorBody, ErrorObject
from minisgl.server.observe import Observer
from minisgl_gateway.error_forms import in_form_of


class RateLimited(RequestError):
    """An API key has reached a limit of a minute.

    retry_after_s: seconds until the same request is within the limit.
    """

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(EngineError):
    """The request was not answered within its `timeout`."""

    code = "deadline_exceeded"
    status = 504

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the request was not answered within its timeout of {timeout_s:g} s; try again later, "
            "or with a longer timeout or fewer tokens"
        )


class Restarting(EngineError):
    """The engine starts again after a failure.

    retry_after_s: the rest of the time that the first start took, at least 1.
    """

    code = "restarting"
    status = 503

    def __init__(self, cause: EngineError, expected_s: float) -> None:
        super().__init__(f"{cause}, so it starts again; try again later")
        self._ready_at = time.monotonic() + expected_s

    @property
    def retry_after_s(self) -> float:
        return max(self._ready_at - time.monotonic(), 1.0)


class Draining(EngineError):
    """The server finishes its open requests and accepts no new ones."""

    code = "draining"
    status = 503

    def __init__(self) -> None:
        super().__init__(
            "the server is shutting down: it finishes open requests and accepts no new ones"
        )


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Return the HTTP status and the object for `error`. An exception of another kind is a bug."""
    param: str | None = None
    if isinstance(error, RequestError):
        status, message, code, param = error.status, error.message, error.code, error.param
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


def client_left() -> Response:
    """Return the response to a client that has left, with nginx's status for that."""
    return Response(status_code=499)


def refusal(message: str, *, status: int, code: str, param: str | None = None) -> InvalidRequest:
    """Return an `InvalidRequest` with this status and code."""
    error = InvalidRequest(message, param=param)
    error.status, error.code = status, code
    return error


@contextlib.contextmanager
def encodable() -> Iterator[None]:
    """Raise InvalidRequest for a value that no message can hold. JSON's integers have no bounds;
    MessagePack's have 64 bits."""
    try:
        yield
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the request holds a value that is out of range: {error}") from None


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
    """Return the path that was probably meant, if /v1 is missing or comes twice; else ""."""
    path = request.url.path.rstrip("/").removeprefix("/v1/v1").removeprefix("/v1")
    known = request.app.openapi()["paths"]
    return next((name for name in (f"/v1{path}", path) if path and name in known), "")


def _routing_error(request: Request, error: HTTPException) -> InvalidRequest:
    path, method = request.url.path, request.method
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return refusal(
            f"{path} does not take {method}, it takes {allowed}",
            status=405,
            code="method_not_allowed",
        )
    if error.status_code == 404:
        near = _nearby(request)
        hint = f"did you mean {near}?" if near else "/docs lists all paths"
        return refusal(
            f"there is nothing at {path}; {hint}",
            status=404,
            code="not_found",
        )
    return refusal(str(error.detail), status=error.status_code, code="http_error")
