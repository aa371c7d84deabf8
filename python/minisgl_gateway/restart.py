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

from minisgl.errors import ConfigError, EngineError, WorkerDied, WorkerHung
from minisgl.server.args import ServerArgs
from minisgl.server.server import Server
from minisgl.utils.logger import get_logger
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.resume import ResumingFrontend

logger = get_logger(__name__)

RESTARTS_WITHIN_S: Final = 3600.0
"""The time in which at most `--max-restarts` are allowed."""

KILL_AGAIN_S: Final = 0.05

HOLD_ON_S: Final = 5.0
"""How often a stream that waits gets a comment. Proxies close a silent connection after 30 s or
more."""


def server_of(args: ServerArgs, start_workers: Callable[[], None]) -> Callable[..., Server]:
    """Return what makes the server of these options. start_workers: starts its workers again."""
    if isinstance(args, GatewayArgs) and args.restart:
        return partial(RestartingServer, start_workers, args.max_restarts, not args.no_resume)
    return Server


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


class RestartingServer(Server):
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
        self._restart: asyncio.Task[None] | None = None

    async def _after_http(self) -> None:
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
        """Start new workers. Until then new requests get a 503, and open ones wait or fail."""
        assert self._loop
        begun = time.monotonic()
        frontend = self._frontend
        restarting = Restarting(error, sum(frontend.observer.start_s.values()))
        holding: asyncio.Task[None] | None = None
        if isinstance(frontend, ResumingFrontend):
            frontend.pause(error, restarting)
            holding = self._loop.create_task(_hold_on(frontend))
        else:
            frontend.fail_all(error)
            frontend.failure = restarting
        self._disconnect(self._loop)
        logger.error("%s; starting it again", error)
        try:
            await asyncio.to_thread(self._replace_workers, str(error))
            if not self._http.should_exit:
                self._queues = self._open_queues()
        except (ConfigError, EngineError) as failed:
            if self._http.should_exit:  # `serve` has killed the new workers
                return
            self._failure = EngineError(f"{error}; it did not start again: {failed}")
            self._end(self._failure)
            return
        finally:
            if holding:
                holding.cancel()
        if self._http.should_exit:
            return
        frontend.reconnect(*self._queues, self._context_length)
        self._connect(self._loop)
        frontend.observer.num_restarts += 1
        if isinstance(frontend, ResumingFrontend):
            frontend.resume()
        logger.info("started again after %.1f s", time.monotonic() - begun)

    def _replace_workers(self, reason: str) -> None:
        """Start new workers and wait until they are ready. Raises StartupFailed."""
        self._workers.end(reason)
        self._workers.reset()
        self._start_workers()
        self._workers.wait_ready()


async def _hold_on(frontend: ResumingFrontend) -> None:
    """Tell the clients at once and every `HOLD_ON_S` that their answers go on."""
    while True:
        frontend.hold_on()
        await asyncio.sleep(HOLD_ON_S)
