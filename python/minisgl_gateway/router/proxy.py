"""The router's HTTP application, which passes requests on to replicas.

::

    POST (an endpoint of the model)   ask a replica for the prompt's hashes, choose, pass on
    /v1/responses/ID                  pass on to the replica that has the answer
    profiles, the X-ray               pass on to the replica that ?replica=NAME names
    /health, /ready, /metrics         answer for all replicas
    /replicas                         answer with their names, and whether they are up
    all others                        pass on to the replica with the least load

If a replica fails before the first byte of its answer, the request goes to another one, once. If it
fails later, another one goes on with the stream (`minisgl_gateway.router.streams`), or the stream
ends with an error event. When a client leaves, its request is aborted.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final
from urllib.parse import parse_qs

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import EngineError, RequestError
from minisgl.server.errors import Draining, refusal
from minisgl.server.web.body import Bodies, read_bytes, response
from minisgl.server.web.errors import client_left, error_response
from minisgl.server.web.guards import Door, behind
from minisgl.utils.logger import get_logger
from minisgl_gateway.keys.guard import key_given
from minisgl_gateway.leaving import ending, while_connected
from minisgl_gateway.lora import ADAPTER_PATHS
from minisgl_gateway.router.checked_keys import CheckedKeys
from minisgl_gateway.router.fleet import Fleet, NoReplica, Replica
from minisgl_gateway.router.metrics import RouterMetrics
from minisgl_gateway.router.replica_state import PromptHashes
from minisgl_gateway.router.streams import PassedRequest, last_event, pieces
from minisgl_gateway.router.upstream import Answer, Headers, ReplicaFailed, end_to_end, with_key
from minisgl_gateway.watch.replica import PREFIX_HEADER, PROMPT_PATHS

logger = get_logger(__name__)

OF_ONE_REPLICA: Final = frozenset(
    ("/start_profile", "/stop_profile", "/xray/events", *ADAPTER_PATHS)
)
"""These concern one engine, so they go to the replica that the request names."""
STORED: Final = "/v1/responses/"
"""A path below this names an answer, which only one replica has stored."""

_NAMES_EARLIER: Final = re.compile(rb'"previous_response_id"\s*:\s*"|"type"\s*:\s*"item_reference"')
"""Matches the body of a request that needs an earlier answer, which one replica has stored."""

PROBE_S: Final = 10.0
"""A question for hashes or about a key ends after this time. Without hashes the load decides."""

PAGE_SIZE: Final = 16
"""Hashes are of pages of this size until a replica has told its own: it is the server's default."""

NAME_HEADER: Final = b"x-minisgl-replica"
"""An answer has this header, so that its reader knows which server to look at."""


class Broken(EngineError):
    """A replica failed, and the request cannot be sent again."""

    code = "replica_failed"
    status = 502


class RouterApp:
    """The application. Mutable: it counts open requests. is_draining: it refuses new ones."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._keys, self._bodies = CheckedKeys(fleet), Bodies()
        self.metrics = RouterMetrics(fleet)
        self.is_draining = False
        self.num_open = 0

    def behind(self, door: Door) -> ASGIApp:
        """Return this application behind `door`."""
        return behind(door, self, lambda: self._fleet.needs_key, self.metrics.refused)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.num_open += 1
        try:
            if path in ("/health", "/ready") and scope["method"] == "GET":
                await self._health(path)(scope, receive, send)
                return
            if path == "/replicas" and scope["method"] == "GET":
                await (await self._replicas(scope["headers"]))(scope, receive, send)
                return
            if self.is_draining:
                raise Draining
            if path == "/metrics" and scope["method"] == "GET":
                await (await self.metrics.page(scope["headers"]))(scope, receive, send)
                return
            body = await self._body(Request(scope, receive))
            await while_connected(self._pass_on(scope, body, send), receive)
        except (EngineError, RequestError) as error:
            self.metrics.refused(error.code)
            await error_response(error, path)(scope, receive, send)
        except ClientDisconnect:
            await client_left()(scope, receive, send)
        finally:
            self.num_open -= 1

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request whose key is good and within its limits."""
        if not {"content-length", "transfer-encoding"} & set(request.headers):
            return b""
        if not self._fleet.up:
            self._fleet.choose()  # raises NoReplica, which says why
        owner = await self._keys.owner(request.scope)
        if request.method == "POST":
            self._fleet.limits.check(key_given(request.headers))
        return await read_bytes(request, self._bodies, owner)

    def _health(self, path: str) -> Response:
        if path == "/ready" and self.is_draining:
            return error_response(Draining(), path)
        try:
            self._fleet.choose()
        except NoReplica as error:
            return error_response(error, path)
        status = "ready" if path == "/ready" else "ok"
        num_up = len(self._fleet.up)
        return response({"status": status, "replicas": len(self._fleet.replicas), "up": num_up})

    async def _replicas(self, headers: Headers) -> Response:
        """Return the names, if the client's key may ask a replica for its state."""
        if self._fleet.needs_key:
            replica = self._fleet.choose()[0]
            try:
                async with asyncio.timeout(PROBE_S):
                    status, body = await replica.upstream.get("/replica", with_key(headers))
            except (ReplicaFailed, TimeoutError):
                raise NoReplica("no replica can check the API key; try again later") from None
            if status != 200:
                return Response(body, status, media_type="application/json")
        rows = [{"name": each.name, "up": each.down is None} for each in self._fleet.replicas]
        return response({"replicas": rows})

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        request = PassedRequest(scope, body)
        if path in OF_ONE_REPLICA:
            await self._relay(request, self._named(scope), send)
        elif path.startswith(STORED):
            await self._send(await self._from_holder(request), request, send)
        elif path in PROMPT_PATHS and method == "POST" and len(self._fleet.up) > 1:
            await self._to_the_best(request, send)
        else:
            await self._relay(request, None, send)

    async def _to_the_best(self, request: PassedRequest, send: Send) -> None:
        """Pass the request on to the replica that has the earlier answer, if the request names one,
        else to the best by prefix and load. If a replica refuses the prompt, send the refusal."""
        began = time.perf_counter()
        needs_earlier = bool(_NAMES_EARLIER.search(request.body))
        prompt, refused, silent = None, None, None
        for replica in self._fleet.up if needs_earlier else [self._fleet.choose()[0]]:
            if refused:
                refused.close()  # it does not have the earlier answer; another one may
                refused = None
            answer = await self._prompt_hashes(replica, request)
            if isinstance(answer, Answer):
                refused = answer
            elif answer is None:
                silent = silent or replica
            else:
                prompt = answer
                break
        if refused and not silent:
            await self._send(refused, request, send, replica)
            return
        if refused:
            refused.close()
        self.metrics.probed(time.perf_counter() - began, found=prompt is not None)
        holder = replica if prompt else silent
        await self._relay(request, holder if needs_earlier else None, send, prompt)

    async def _prompt_hashes(
        self, replica: Replica, request: PassedRequest
    ) -> PromptHashes | Answer | None:
        """Return the prompt's hashes; the replica's answer if it refuses the prompt; None if it
        fails."""
        state = replica.view.state
        size = str(state.page_size if state else PAGE_SIZE).encode()
        headers = [*request.headers, (PREFIX_HEADER.encode(), size)]
        try:
            async with asyncio.timeout(PROBE_S):
                answer = await replica.upstream.request(
                    request.method, request.target, headers, request.body
                )
                if 400 <= answer.status < 500:
                    return answer
                try:
                    body = await answer.whole()
                finally:
                    answer.close()
            return msgspec.json.decode(body, type=PromptHashes) if answer.status == 200 else None
        except (ReplicaFailed, TimeoutError, msgspec.DecodeError):
            return None  # `_relay` reports the failure

    async def _relay(
        self,
        request: PassedRequest,
        only: Replica | None,
        send: Send,
        prompt: PromptHashes | None = None,
    ) -> None:
        """Pass the request on to `only`. If that is None, pass it on to the best replica, and to
        another one if the first fails.

        prompt: decides which replica is the best; None if it is unknown.
        """
        tried: list[Replica] = []
        hashes = np.frombuffer(prompt.hashes, "<u8").tolist() if prompt else []
        num_tokens, page_size = (prompt.num_tokens, prompt.page_size) if prompt else (0, 1)
        if prompt and prompt.key:
            self._fleet.limits.learn(prompt.key)
        passed = self._fleet.limits.admit(request.key) if request.method == "POST" else None
        for is_last in (False, True):
            replica, cached = only, 0
            if replica is None:
                replica, cached = self._fleet.choose(num_tokens, hashes, page_size, without=tried)
            tried.append(replica)
            others = [each for each in self._fleet.up if each not in tried]
            may_retry = only is None and not is_last and bool(others)
            num_new = max(num_tokens - cached, 1) if prompt else 0
            sent = self._fleet.views.send(replica.view, num_new, hashes, time.monotonic())
            if passed:
                passed.send(num_tokens)
            replica.num_open += 1
            outcome = "left"
            try:
                answer = await request.ask(replica)
                outcome = "failed"
                if answer.status == 503 and may_retry:
                    answer.close()
                else:
                    await _begin(answer)
                    request.began()
                    sent.started_at = time.monotonic()
                    if passed and answer.status >= 400:
                        passed.take_back(num_tokens, is_counted=answer.status != 429)
                    if await self._send(answer, request, send, replica):
                        outcome = "answered"
                    return
            except ReplicaFailed as error:
                outcome = "failed"
                self._fleet.failed(replica, error)
                if not may_retry:
                    raise Broken(
                        f"replica {replica.name} failed before it answered ({error}); try again "
                        "later"
                    ) from None
            except asyncio.CancelledError:
                outcome = "left"
                raise
            finally:
                replica.num_open -= 1
                replica.ends[outcome] += 1
                if outcome != "answered" and sent.started_at is None:
                    self._fleet.views.take_back(replica.view, sent)
                    if passed:
                        passed.take_back(num_tokens)
            self.metrics.num_retries += 1
            logger.info("request %s goes to another replica", request.id)

    async def _send(
        self, answer: Answer, request: PassedRequest, send: Send, replica: Replica | None = None
    ) -> bool:
        """Send the answer to the client. Return whether `replica` sent all of it. An answer that
        fails, or that `end_open` cancels, ends with an error event, or is cut."""
        parts = pieces(answer, request, self._fleet, replica)
        try:
            headers = end_to_end(answer.headers, b"date", b"server")
            headers += [(NAME_HEADER, replica.name.encode())] if replica else []
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            has_more = True
            async for data, has_more in parts:
                await send({"type": "http.response.body", "body": data, "more_body": has_more})
            if has_more:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            return answer.is_complete
        except (ReplicaFailed, asyncio.CancelledError) as error:
            broken = self._broken(error, replica)
            if (event := last_event(request.path, answer.media_type, broken)) is None:
                request.abort_connection()
            else:
                await send({"type": "http.response.body", "body": event, "more_body": False})
            logger.warning("request %s is cut: %s", request.id, broken)
            return False
        finally:
            answer.close()
            await parts.aclose()

    def _broken(
        self, error: ReplicaFailed | asyncio.CancelledError, replica: Replica | None
    ) -> EngineError:
        """Return what to tell the client. Raises `error` if it has left."""
        if isinstance(error, asyncio.CancelledError):
            return ending(error)
        if replica:
            self._fleet.failed(replica, error)
        name = replica.name if replica else "a replica"
        return Broken(f"replica {name} failed within its answer ({error}); try again")

    async def _from_holder(self, request: PassedRequest) -> Answer:
        """Return the answer of the replica that has the response of the path, or the last 404."""
        up = self._fleet.up
        if not up:
            self._fleet.choose()  # raises NoReplica, which says why
        for replica in up:
            try:
                answer = await request.ask(replica)
            except ReplicaFailed as error:
                self._fleet.failed(replica, error)
                continue
            if answer.status != 404 or replica is up[-1]:
                return answer
            answer.close()
        raise Broken("no replica could say whether it has this response; try again later")

    def _named(self, scope: Scope) -> Replica:
        names = [replica.name for replica in self._fleet.replicas]
        given = parse_qs(scope["query_string"].decode("latin-1")).get("replica", [""])[0]
        if not given and len(names) == 1:
            return self._fleet.replicas[0]
        if given not in names:
            known = "those that GET /replicas lists" if self._fleet.needs_key else ", ".join(names)
            raise refusal(
                f"{scope['path']} needs one replica: add ?replica=NAME, one of {known}",
                status=400,
                code="replica_needed",
                param="replica",
            )
        return self._fleet.replicas[names.index(given)]


async def _begin(answer: Answer) -> None:
    """Wait for the first piece of the answer; close the answer if that fails or is cancelled."""
    try:
        await answer.begin()
    except BaseException:
        answer.close()
        raise
