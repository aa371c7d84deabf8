"""What routes are built from: rows of the table `routes`, and the server that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter

from minisgl.server.clients import Keys
from minisgl.server.frontend import Frontend
from minisgl.server.model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The server that routes belong to. keys: None if every client may use it. open_ids: the
    X-Request-Ids of all requests that have no whole answer yet."""

    frontend: Frontend
    model: ServedModel
    keys: Keys | None
    open_ids: Container[str]


@dataclass(frozen=True, slots=True)
class Routes:
    """A family of routes. router: makes them. records: the roots of their schema in
    /openapi.json."""

    router: Callable[[Site], APIRouter]
    records: tuple[type[msgspec.Struct], ...] = ()
