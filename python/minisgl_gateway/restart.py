"""`--restart`: after a worker has died or hangs, the engine starts again behind the same port.

Open requests wait and go on (`minisgl_gateway.resume`); with `--no-resume` they end with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from minisgl.errors import EngineError, WorkerDied, WorkerHung
from minisgl.server.args import ServerArgs
from minisgl.server.frontend import Frontend
from minisgl.server.server import Server
from minisgl.utils.logger import get_logger
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.resume import ResumingFrontend
from minisgl_gateway.upgrade.door import Say
from minisgl_gateway.upgrade.server import UpgradableServer

logger = get_logger(__name__)

RESTARTS_WITHIN_S: Final = 3600.0
"""The time in which at most `--max-restarts` are allowed."""

KILL_AGAIN_S: Final = 0.05

HOLD_ON_S: Final = 5.0
"""How often a stream that waits gets a comment. Proxies close a silent connection after 30 s or
more."""


UPGRADED: Final = EngineError("the server is being upgraded")


def server_of(args: ServerArgs, start_workers: Callable[[], None]) -> Callable[..., Server]:
    """Return what makes the server of these options. start_workers: starts its workers again."""
    if isinstance(args, GatewayArgs) and args.restart:
        return partial(RestartingServer, start_workers, args.max_restarts, not args.no_resume)
    return UpgradableServer


class Restarting(EngineError):
    """The engine starts again after a failure.

    retry_after_s: the rest of the time that the first start took, at least 1.
    """

    code = "restarting"
    is_passing = True
    status = 503

    def __init__(self, cause: EngineError, expected_s: float) -> None:
        super().__init__(f"{cause}, so it starts again; try again later")
        self._ready_at = time.monotonic() + expected_s

    @property
    def retry_after_s(self) -> float:
        return max(self._ready_at - time.monotonic(), 1.0)


class RestartingServer(UpgradableServer):
    """A server that starts its workers again. Mutable: it counts the restarts."""

    def __init__(
        self, start_workers: Callable[[], None], max_restarts: int, resumes: bool, *parts: Any
    ) -> None:
        """resumes: whether open requests go on. parts: the arguments of `Server`."""
        if resumes:
            self._frontend_type = ResumingFrontend
        super().__init__(*parts)
        self._start_workers = start_workers
        self._max_restarts = max_restarts
        self._restarts: deque[float] = deque()
        self._holding: asyncio.Task[None] | None = None

    async def _after_http(self) -> None:
        await super()._after_http()
        while self._restart and not self._restart.done():
            self._workers.kill()  # ends the wait for them
            await asyncio.wait([self._restart], timeout=KILL_AGAIN_S)

    def _fail(self, error: EngineError) -> None:
        if self._restart and not self._restart.done():
            return
        is_over = self._http.should_exit or not isinstance(error, WorkerDied | WorkerHung)
        if is_over or not self._may_restart():
            super()._fail(error)
            return
        self._restart = asyncio.create_task(self._start_again(error))

    def _may_restart(self) -> bool:
        if self._frontend.is_draining:
            return False
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTARTS_WITHIN_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            logger.error("there were %d restarts within an hour already", len(self._restarts))
            return False
        self._restarts.append(now)
        return True

    async def _start_again(self, error: EngineError) -> None:
        """Start new workers. Until then requests wait, or with `--no-resume` fail."""
        assert self._loop
        frontend = self._frontend
        restarting = Restarting(error, sum(frontend.observer.start_s.values()))
        if isinstance(frontend, ResumingFrontend):
            frontend.pause(error, restarting)
        else:
            frontend.fail_all(error)
            frontend.failure = restarting
        self._disconnect(self._loop)
        logger.error("%s; starting it again", error)
        frontend.observer.num_restarts += 1
        await self._bring_up(error)

    async def _bring_up(self, error: EngineError) -> None:
        """Start new workers, and let requests go on. error: why there are none. If they do not
        start, the server ends."""
        assert self._loop
        begun, frontend = time.monotonic(), self._frontend
        holding = asyncio.create_task(_hold_on(frontend))
        try:
            await asyncio.to_thread(self._replace_workers, str(error))
            if not self._http.should_exit:
                self._queues = self._open_queues()
        except Exception as failed:  # the system may have no room for a process or a socket
            if self._http.should_exit:  # `serve` has killed the new workers
                return
            self._failure = EngineError(f"{error}; it did not start again: {failed}")
            self._end(self._failure)
            return
        finally:
            holding.cancel()
        if self._http.should_exit:
            return
        frontend.reconnect(*self._queues, self._workers.info)
        self._connect(self._loop)
        if isinstance(frontend, ResumingFrontend):
            frontend.resume()
        logger.info("started again after %.1f s", time.monotonic() - begun)

    async def _make_room(self, drain_s: float, say: Say) -> None:
        frontend = self._frontend
        if not isinstance(frontend, ResumingFrontend):
            await super()._make_room(drain_s, say)
            return
        assert self._loop
        expected_s = sum(frontend.observer.start_s.values()) + drain_s
        upgrading = Restarting(UPGRADED, expected_s)
        frontend.hold(upgrading)
        say(
            f"new requests wait; open requests: {frontend.num_sent}, for at most {drain_s:g} s, "
            "then the engine ends"
        )
        await self._wait(lambda: frontend.num_sent, drain_s)
        if self._restart:
            await asyncio.wait([self._restart])
        frontend.pause(UPGRADED, upgrading, is_planned=True)
        self._holding = asyncio.create_task(_hold_on(frontend))
        self._disconnect(self._loop)
        await asyncio.to_thread(self._workers.end)

    async def _go_back(self) -> None:
        if not isinstance(self._frontend, ResumingFrontend):
            return
        self._restart = asyncio.create_task(self._bring_up(UPGRADED))
        await asyncio.wait([self._restart])

    def _replace_workers(self, reason: str) -> None:
        """Start new workers and wait until they are ready. Raises StartupFailed."""
        self._workers.end(reason)
        self._workers.reset()
        self._start_workers()
        self._workers.wait_ready()


async def _hold_on(frontend: Frontend) -> None:
    """Tell the clients at once and every `HOLD_ON_S` that their answers go on, until they do."""
    while isinstance(frontend, ResumingFrontend) and frontend.is_paused:
        frontend.hold_on()
        await asyncio.sleep(HOLD_ON_S)
