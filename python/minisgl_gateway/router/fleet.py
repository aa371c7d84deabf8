"""The replicas behind a router: it asks for their states, and so knows which are up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from minisgl.errors import EngineError
from minisgl.utils.logger import get_logger
from minisgl_gateway.router.key_limits import KeyLimits
from minisgl_gateway.router.replica_state import ReplicaState
from minisgl_gateway.router.upstream import ReplicaFailed, Unreachable, Upstream, bearer
from minisgl_gateway.router.view import View, Views
from minisgl_gateway.router.waits import Wait, query_of, to_ask

logger = get_logger(__name__)

ASK_EVERY_S: Final = 1.0
"""Each replica is asked so often: the router counts its own requests in between."""
ASK_S: Final = 5.0
"""A question for a state ends after this time. A replica in a long step does not answer; then
/ready is asked."""
SILENT_S: Final = 30.0
"""After this time without an answer to any question, requests of which nothing comes either fail. A
stopped process keeps its connections, so only its silence shows. As long as for a machine that is
gone (`upstream.KEEPALIVE`)."""


class NoReplica(EngineError):
    """No replica can take the request."""

    code = "no_replica"
    status = 503


class Replica:
    """One server. Mutable. down: why it gets no requests; None if it is up. heard_at: when it
    answered a question of the fleet last. waits: the requests whose answer has not begun. ends: the
    number of requests sent to it, by how they ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.upstream = Upstream(url)
        self.name = self.upstream.name
        self.view = View()
        self.down: str | None = "it has not answered yet"
        self.heard_at = time.monotonic()
        self.num_open = 0
        self.waits: set[Wait] = set()
        self.ends: Counter[str] = Counter({"answered": 0, "failed": 0, "left": 0})


class Fleet:
    """All replicas. Mutable.

    key: the router's API key, for requests for their states; None if they need none. needs_key:
    whether clients need one, too: the replicas have keys.
    """

    def __init__(self, urls: Sequence[str], key: str | None = None) -> None:
        self.replicas = [Replica(url) for url in urls]
        self.views = Views()
        self.limits = KeyLimits()
        self.model = ""
        self._headers = bearer(key)
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._asks: set[asyncio.Task[None]] = set()
        self.needs_key = key is not None

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.down is None]

    async def start(self) -> None:
        """Ask each replica for its state, and repeat that every `ASK_EVERY_S`."""
        await asyncio.gather(*(self.ask(replica) for replica in self.replicas))
        self._watch_all()

    def _watch_all(self) -> None:
        for replica in self.replicas:
            if replica not in self._watches:
                self._watches[replica] = asyncio.create_task(self._watch(replica))

    async def change(self, urls: Collection[str]) -> None:
        """Replace the replicas by those at `urls`. Open requests to removed ones continue."""
        for replica in [each for each in self.replicas if each.url not in urls]:
            self.lost(replica, "it is no replica any more")
            self.replicas.remove(replica)
            if watch := self._watches.pop(replica, None):  # none yet while `start` asks
                watch.cancel()
            replica.upstream.close()
        known = {each.url for each in self.replicas}
        added = [Replica(url) for url in urls if url not in known]
        self.replicas += added
        self._watch_all()
        await asyncio.gather(*(self.ask(replica) for replica in added))

    def close(self) -> None:
        for task in (*self._watches.values(), *self._asks):
            task.cancel()
        for replica in self.replicas:
            replica.upstream.close()

    def choose(
        self,
        num_tokens: int = 0,
        hashes: Sequence[int] = (),
        page_size: int = 1,
        *,
        without: Sequence[Replica] = (),
    ) -> tuple[Replica, int]:
        """Return the replica for a prompt, and how many tokens of the prompt it has cached.

        Raises NoReplica if no replica outside `without` is up.
        """
        up = [replica for replica in self.up if replica not in without]
        if not up:
            raise NoReplica(self._why_none())
        views = [replica.view for replica in up]
        view, cached = self.views.choose(views, num_tokens, hashes, page_size, time.monotonic())
        return up[views.index(view)], cached

    def failed(self, replica: Replica, error: ReplicaFailed) -> None:
        """Handle a failed request. An unreachable replica is down; another that was up is asked for
        its state now."""
        if isinstance(error, Unreachable):
            self.lost(replica, str(error))
        if replica.down is not None:
            return
        task = asyncio.create_task(self.ask(replica))
        self._asks.add(task)
        task.add_done_callback(self._asks.discard)

    def lost(self, replica: Replica, reason: str) -> None:
        """Mark the replica as down: it gets no requests until it answers again."""
        if replica.down is None:
            logger.warning("replica %s is down: %s", replica.name, reason)
        replica.down = reason
        self.views.forget(replica.view)

    async def ask(self, replica: Replica) -> None:
        """Ask for the replica's state. A replica that does not answer is down."""
        asked_at, asked = time.monotonic(), to_ask(replica.waits)
        try:
            try:
                async with asyncio.timeout(ASK_S):
                    state = await self._state(replica, query_of(asked))
            except TimeoutError:
                async with asyncio.timeout(ASK_S):
                    await self._get(replica, "/ready")
                return  # it is up, and its last state stays
        except TimeoutError:
            self.lost(replica, f"no answer within {ASK_S:g} s")
            if time.monotonic() - replica.heard_at >= SILENT_S:
                replica.upstream.give_up(SILENT_S)
        except ReplicaFailed as error:
            self.lost(replica, str(error))
        else:
            for wait in asked:
                if wait in replica.waits:
                    wait.answered(wait.id in state.open)
            self._found(replica, state, asked_at)

    def _found(self, replica: Replica, state: ReplicaState, asked_at: float) -> None:
        if replica not in self.replicas:
            return  # `change` has removed it meanwhile
        if any(each is not replica for each in self.up) and state.model != self.model:
            reason = f"it serves {state.model!r}, and the others serve {self.model!r}"
            self.lost(replica, reason)
            return
        self.model = state.model
        if replica.down is not None:
            logger.info("replica %s is up", replica.name)
        replica.down = None
        self.views.update(replica.view, state, asked_at)
        states = [each.view.state for each in self.up]
        self.needs_key = all(each is None or each.keys is not None for each in states)
        if state.keys is not None:
            self.limits.update(replica.name, state.keys)

    async def _state(self, replica: Replica, query: str) -> ReplicaState:
        body = await self._get(replica, "/replica", query)
        try:
            return msgspec.json.decode(body, type=ReplicaState)
        except msgspec.DecodeError as error:
            raise ReplicaFailed(f"its answer to /replica is not of this version: {error}") from None

    async def _get(self, replica: Replica, path: str, query: str = "") -> bytes:
        status, body = await replica.upstream.get(path + query, self._headers)
        replica.heard_at = time.monotonic()
        if status == 200:
            return body
        if status == 401:
            self.needs_key = True
            raise ReplicaFailed("it needs an API key: give the router one with --api-key")
        if status == 403:
            raise ReplicaFailed("the router's --api-key needs admin rights there")
        if status == 404:
            raise ReplicaFailed(f"it has no {path}: is it a Mini-SGLang server of this version?")
        raise ReplicaFailed(f"{path} answers {status}: {message_of(body)}")

    async def _watch(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            try:
                await self.ask(replica)
            except Exception:
                logger.exception("replica %s cannot be watched", replica.name)

    def _why_none(self) -> str:
        reasons = "; ".join(f"{each.name}: {each.down}" for each in self.replicas if each.down)
        return f"no replica can take the request ({reasons or 'each has failed'}); try again later"


def message_of(body: bytes) -> str:
    """Return the message of a replica's error."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
