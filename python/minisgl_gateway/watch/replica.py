"""Answers a router's requests for the server's state and for a prompt's hashes.

GET /replica returns the state; with ?open=ID,ID,... it also says which of these requests the server
has, because a request may be lost on its way while others are answered. A request to an endpoint of
the model with the header `X-Minisgl-Prefix: PAGE_SIZE` returns the prompt's `PromptHashes`, by
which the router finds cached prefixes. The model does not run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl.errors import EngineError, InvalidRequest
from minisgl.message import Prompt, WatchMsg, WatchReply, ids_from_bytes
from minisgl.server.errors import Draining
from minisgl.server.frontend import Frontend
from minisgl.server.site import Routes, Site
from minisgl.server.web import body
from minisgl_gateway.codec import encode, key_number
from minisgl_gateway.keys.ring import Key, KeyRing
from minisgl_gateway.router.prefix_hashes import prompt_hashes
from minisgl_gateway.router.replica_state import PromptHashes, ReplicaState

PREFIX_HEADER: Final = "x-minisgl-prefix"
PROMPT_PATHS: Final = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate",
     "/api/chat", "/api/generate")
)  # fmt: skip
"""Requests to these paths have a prompt, whose cached prefix decides which replica gets them."""

TIMEOUT_S: Final = 30.0
"""The longest wait for a state. A step of a long prompt on a CPU takes seconds."""

FRESH_S: Final = 0.2
"""How long a state is returned again instead of a new one."""

MAX_PAGE_SIZE: Final = 65_536


def router(site: Site) -> APIRouter:
    frontend, model, open_ids = site.frontend, site.model, site.open_ids
    keys = site.keys if isinstance(site.keys, KeyRing) else None
    routes = APIRouter()
    made_at = -FRESH_S
    made: ReplicaState | None = None

    @routes.get("/replica")
    async def replica(open: str = "") -> Response:
        """The server's load and its cached prefixes, for a router."""
        nonlocal made_at, made
        if frontend.is_draining:
            raise Draining
        if frontend.failure:
            raise frontend.failure
        if made is None or time.monotonic() - made_at >= FRESH_S:
            trips = frontend.round_trips
            answers = await trips.ask(WatchMsg(seq=trips.new_seq()), 1, TIMEOUT_S)
            if not answers or not isinstance(answers[0], WatchReply):
                raise EngineError(f"no answer from the engine within {TIMEOUT_S:g} s")
            state = msgspec.json.decode(answers[0].frame, type=ReplicaState)
            made = msgspec.structs.replace(
                state, model=model.name, max_model_len=frontend.context_length
            )
            made_at = time.monotonic()
        uses = None
        if keys is not None:  # the guard has checked that the request's key has admin rights
            uses = [key.use() for key in keys if key.num_requests]
        known = [each for each in open.split(",") if each in open_ids]
        return body.response(msgspec.structs.replace(made, keys=uses, open=known))

    return routes


async def prefix_answer(
    request: Request, frontend: Frontend, prompts: Sequence[Prompt], namespace: str
) -> Response:
    """Return the hashes of the first prompt, and the number of tokens of all prompts.

    Raises RequestError, EngineError.
    """
    asked = request.headers[PREFIX_HEADER]
    if not asked.isdecimal() or not 1 <= int(asked[:6]) <= MAX_PAGE_SIZE or len(asked) > 5:
        raise InvalidRequest(
            f"the header X-Minisgl-Prefix must be a page size from 1 to {MAX_PAGE_SIZE}"
        )
    page_size = int(asked)
    number = key_number(request.scope)
    replies = [await encode(frontend, prompt, number, for_cache=True) for prompt in prompts]
    hashes = prompt_hashes(ids_from_bytes(replies[0].ids), page_size, namespace)
    key: Key | None = request.scope.get("api_key")
    answer = PromptHashes(
        num_tokens=sum(len(ids_from_bytes(reply.ids)) for reply in replies),
        page_size=page_size,
        hashes=hashes.astype("<u8").tobytes(),
        key=key.use() if key else None,
    )
    return body.response(answer)


ROUTES: Final = Routes(router)
