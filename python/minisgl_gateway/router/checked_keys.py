"""Checks keys before the router reads bodies: it asks a replica whether it knows a key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.server.errors import refusal
from minisgl.server.web.connections import client_address
from minisgl_gateway.keys.guard import key_given
from minisgl_gateway.keys.ring import digest_of
from minisgl_gateway.router.fleet import Fleet, message_of
from minisgl_gateway.router.upstream import ReplicaFailed, with_key

ASKED: Final = "/v1/models"
"""This path needs a key, and its answer costs a replica little."""

ASK_S: Final = 1.0
"""A question ends after this time. Then another one is asked; if none answers, the body takes the
memory of the client's address."""

KEPT_S: Final = 30.0
"""A key counts as known for this time. The replicas check each request themselves, so a key that
was removed may only fill its share of the router's memory."""

MOST_KEPT: Final = 4096
"""So many keys are known at most; for each of more, a replica is asked each time."""


class CheckedKeys:
    """The keys that the replicas know. Mutable."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet, self._clock = fleet, clock
        self._known: dict[bytes, float] = {}  # until when, by digest; the oldest first

    async def owner(self, scope: Scope) -> str:
        """Return who takes the memory of a request's body: its key if the replicas need one, else
        the client's address. Raises InvalidRequest (401) if they do not know the key."""
        key = key_given(Headers(scope=scope))
        digest = digest_of(key)
        if self._fleet.needs_key and (
            self._known.get(digest, 0.0) > self._clock() or await self._ask(scope, digest)
        ):
            return f"key {digest.hex()}"
        return client_address((scope.get("client") or ("",))[0])

    async def _ask(self, scope: Scope, digest: bytes) -> bool:
        """Return whether a replica knows the key; False if none answers. Raises InvalidRequest."""
        for replica in self._fleet.up:
            try:
                async with asyncio.timeout(ASK_S):
                    status, body = await replica.upstream.get(ASKED, with_key(scope["headers"]))
            except (ReplicaFailed, TimeoutError):
                continue  # `Fleet` sees whether it is down
            if status == 401:
                raise refusal(message_of(body), status=401, code="invalid_api_key")
            self._known.pop(digest, None)
            if len(self._known) == MOST_KEPT:
                del self._known[next(iter(self._known))]
            self._known[digest] = self._clock() + KEPT_S
            return True
        return False
