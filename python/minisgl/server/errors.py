"""Errors of the API process, which become answers in `minisgl.server.web.errors`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from minisgl.errors import EngineError, InvalidRequest, RequestError


class DeadlineExceeded(EngineError):
    """The request was not answered within its `timeout`."""

    code = "deadline_exceeded"
    status = 504

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the request was not answered within its timeout of {timeout_s:g} s; try again later, "
            "or with a longer timeout or fewer tokens"
        )


class Draining(EngineError):
    """The server accepts no new requests, and ends those that are open."""

    code = "draining"
    status = 503

    def __init__(self) -> None:
        super().__init__("the server is shutting down: send the request again later")


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


def rename(error: RequestError, names: Mapping[str, str]) -> None:
    """Change an error so that it names the request's field.

    names: the request's names, by the names that the workers use. For example, "the prompt has"
    becomes "the field messages has".
    """
    param = error.param or ""
    for old, new in names.items():
        if param == old or param.startswith((f"{old}.", f"{old}[")):
            error.param = new + param.removeprefix(old)
            name = f"field {error.param}" if f"the {param} " in error.message else error.param
            error.message = error.message.replace(param, name, 1)
            return


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Apply `rename` to the RequestErrors that the block raises."""
    try:
        yield
    except RequestError as error:
        rename(error, names)
        raise


def in_turn(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """Return `first`, with each of its values replaced by the name that `second` has for it."""
    changed = {}
    for old, new in first.items():
        error = InvalidRequest("", param=new)
        rename(error, second)
        changed[old] = error.param or new
    return changed
