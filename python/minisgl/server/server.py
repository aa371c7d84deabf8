"""The API server over running workers.

It runs in the supervisor's process. The event loop watches each worker's sentinel, which shows a
death at once, and its heartbeats, which show a hang within `--hang-timeout`. Then every open
request ends with an error, which `serve` raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from minisgl import plugins
from minisgl.errors import EngineError, WorkerHung
from minisgl.message.frontend import UserReply
from minisgl.runtime.worker import Worker
from minisgl.runtime.workers import Peer, Workers
from minisgl.server.address import listen, url_of
from minisgl.server.api_server import create_app
from minisgl.server.args import ServerArgs
from minisgl.server.clients import Keys
from minisgl.server.command import finish_open
from minisgl.server.errors import Draining
from minisgl.server.frontend import Frontend
from minisgl.server.model import ServedModel
from minisgl.server.observe import Observer, PromptWatcher
from minisgl.server.web.guards import door_of
from minisgl.server.web.http import HttpServer
from minisgl.utils.hangs import CHECK_S
from minisgl.utils.logger import get_logger
from minisgl.utils.start import StartClock, describe_start
from minisgl.utils.zmq import AsyncPullQueue, PushQueue

logger = get_logger(__name__)


class Server:
    """The API server over running workers. Mutable: it starts, may fail, and stops.

    A subclass that needs another class of frontend sets `_frontend_type` before `__init__`.
    """

    _frontend_type: type[Frontend] = Frontend

    def __init__(
        self,
        workers: Workers,
        bound: socket.socket,
        model: ServedModel,
        args: ServerArgs,
        keys: Keys | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._workers = workers
        self._socket = bound
        self._num_tokenizers = max(args.num_tokenizer, 1)
        self._tasks: list[asyncio.Task[None]] = []
        made = [row.load()(args, model.name) for row in plugins.rows("prompt_watchers")]
        watchers: list[PromptWatcher] = [watcher for watcher in made if watcher]
        observer = Observer(watchers)
        self._queues = self._open_queues()
        self._frontend = self._frontend_type(
            *self._queues,
            observer,
            num_ranks=args.num_local,
            max_queued=args.max_queued_requests,
            max_running=args.max_running_requests,
            clamps=args.max_tokens_policy == "clamp",
        )
        self._frontend.only_embeds = bool(model.only_task)
        door = door_of(args.host, args.cors_origin, args.allowed_host)
        app = create_app(self._frontend, model, workers.stalled, keys, door)
        self._http = HttpServer(app, tls)
        self._drain_s = args.drain_timeout
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: EngineError | None = None

    def on_workers_ready(self, clock: StartClock) -> None:
        """Read the workers' reports."""
        self._frontend.info = info = self._workers.info
        clock.lap_in_parts(info["start_s"], rest="others")
        self._frontend.observer.start_s = clock.part_s
        logger.info("started: %s", describe_start(clock.part_s))

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until `stop`. Raises EngineError if a worker or this server fails before that."""
        self._loop = asyncio.get_running_loop()
        self._connect(self._loop)
        try:
            listen(self._socket)
            await self._http.serve_on(self._socket, on_ready)
        finally:
            if self._drain:
                self._drain.cancel()
            await self._after_http()
            self._disconnect(self._loop)
            self._frontend.observer.close()
            self._loop = None
        if self._failure:
            raise self._failure

    async def _after_http(self) -> None:
        """Called when HTTP has ended. A subclass waits here for what it has begun."""

    def _open_queues(self) -> tuple[list[PushQueue], AsyncPullQueue[UserReply]]:
        endpoints = self._workers.endpoints
        tokenizers = [PushQueue(endpoints.tokenizer(i)) for i in range(self._num_tokenizers)]
        return tokenizers, AsyncPullQueue(endpoints.api, UserReply)

    def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver the workers' replies, and watch the workers."""
        for worker in self._workers.processes:
            sign = worker.process.sentinel
            loop.add_reader(sign, self._on_death, sign, worker)
        for node in self._workers.nodes:
            loop.add_reader(node.status, self._on_death, node.status, node)
        dispatch = loop.create_task(self._frontend.run())
        dispatch.add_done_callback(self._on_dispatch_end)
        self._tasks = [dispatch, loop.create_task(self._watch_hangs())]

    def _disconnect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `_connect`. A second call does nothing."""
        for task in self._tasks:
            task.cancel()
        for worker in self._workers.processes:
            loop.remove_reader(worker.process.sentinel)
        for node in self._workers.nodes:
            loop.remove_reader(node.status)
        tokenizers, replies = self._queues
        for queue in tokenizers:
            queue.close()
        replies.close()
        self._frontend.observer.status.clear()

    def serve_beside(self, foreground: Callable[[str], int]) -> int:
        """Run `serve` in a thread, and `foreground` in the main thread, which gets the signals.

        Returns the exit code of `foreground`.
        """
        started = threading.Event()
        failures: list[Exception] = []

        def serve() -> None:
            try:
                asyncio.run(self.serve(started.set))
            except Exception as error:
                failures.append(error)
            finally:
                started.set()

        thread = threading.Thread(target=serve, name="server")
        thread.start()
        code = 1
        try:
            started.wait()
            if not failures:
                code = foreground(url_of(self._socket))
        finally:
            started.wait()
            self.stop()
            thread.join()
        if failures:
            raise failures[0]
        return code

    def stop(self, *, drain: bool = False) -> None:
        """Refuse new requests, end the open ones, and let `serve` return. Any thread may call this.

        drain: first let open requests finish, for `--drain-timeout`.
        """
        if loop := self._loop:
            with contextlib.suppress(RuntimeError):  # `serve` has just returned
                loop.call_soon_threadsafe(self._stop, drain)

    def _stop(self, drain: bool) -> None:
        if drain and not self._frontend.is_draining:
            self._frontend.is_draining = True
            self._drain = asyncio.create_task(self._finish_open())
        else:
            self._end(Draining())

    async def _finish_open(self) -> None:
        await finish_open(lambda: self._frontend.num_open, self._drain_s)
        self._end(Draining())

    def _end(self, error: EngineError) -> None:
        error.status = 503
        self._frontend.fail_all(error)
        self._http.should_exit = True

    async def _watch_hangs(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                self._workers.check_hangs()
            except WorkerHung as error:
                self._fail(error)
                return

    def _on_death(self, sign: int | Connection, ended: Worker | Peer) -> None:
        if self._loop:
            self._loop.remove_reader(sign)
        self._fail(ended.death() or EngineError(f"{ended.name} has ended"))

    def _on_dispatch_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            logger.error("replies cannot be delivered any more", exc_info=error)
            self._fail(EngineError(f"the API server failed ({type(error).__name__}: {error})"))

    def _fail(self, error: EngineError) -> None:
        if self._http.should_exit:
            return
        self._failure = error
        self._end(error)
