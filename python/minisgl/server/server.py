"""The API server over running workers.

It runs in the supervisor's process. The event loop watches each worker's sentinel, so a death shows
at once, and its heartbeats, so a hang shows within `--hang-timeout`: every open request is answered
with an error, and `serve` raises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Final

from minisgl.errors import EngineError, WorkerHung
from minisgl.message.frontend import UserReply
from minisgl.runtime.hang_watch import CHECK_S
from minisgl.runtime.node_link import NodeLink
from minisgl.runtime.worker import Worker
from minisgl.runtime.workers import Workers
from minisgl.server.address import listen, url_of
from minisgl.server.api.models import ServedModel
from minisgl.server.api_server import create_app
from minisgl.server.args import ServerArgs, origins_of
from minisgl.server.frontend import Frontend
from minisgl.server.http import HttpServer
from minisgl.server.keys import KeyRing
from minisgl.server.telemetry.observe import Observer
from minisgl.utils.logger import get_logger
from minisgl.utils.start import StartClock, describe_start
from minisgl.utils.zmq import AsyncPullQueue, PushQueue

logger = get_logger(__name__)

DRAIN_CHECK_S: Final = 0.05


class Server:
    """The API server over running workers. Mutable: it starts, may fail, and stops."""

    def __init__(
        self,
        workers: Workers,
        bound: socket.socket,
        model: ServedModel,
        args: ServerArgs,
        keys: KeyRing | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._workers = workers
        self._socket = bound
        endpoints = workers.endpoints
        num_tokenizers = max(args.num_tokenizer, 1)
        self._tokenizers = [PushQueue(endpoints.tokenizer(i)) for i in range(num_tokenizers)]
        self._replies: AsyncPullQueue[UserReply] = AsyncPullQueue(endpoints.api, UserReply)
        tracer = None
        if args.otlp_endpoint:
            from minisgl.server.telemetry.tracing import create_tracer

            tracer = create_tracer(args.otlp_endpoint, model.name)
        observer = Observer(log_requests=args.log_requests, tracer=tracer)
        self._frontend = Frontend(
            self._tokenizers,
            self._replies,
            observer,
            num_ranks=args.num_local,
            max_queued=args.max_queued_requests,
            max_running=args.max_running_requests,
        )
        origins = origins_of(args.cors_origin)
        app = create_app(self._frontend, model, workers.stalled, keys, origins)
        self._http = HttpServer(app, tls)
        self._drain_s = args.drain_timeout
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: EngineError | None = None

    def on_workers_ready(self, clock: StartClock) -> None:
        """Take over what the workers report: the context length, and the times of the start for the
        log and for /metrics."""
        info = self._workers.info
        pool_tokens = info["num_pages"] * info["page_size"]
        self._frontend.context_length = min(info["max_seq_len"], pool_tokens)
        clock.lap_in_parts(info["start_s"], rest="others")
        self._frontend.observer.start_s = clock.part_s
        logger.info("started: %s", describe_start(clock.part_s))

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until `stop`. Raises EngineError if a worker or this server fails before that."""
        self._loop = asyncio.get_running_loop()
        for worker in self._workers.processes:
            self._loop.add_reader(worker.process.sentinel, self._on_death, worker)
        for node in self._workers.nodes:
            self._loop.add_reader(node.status, self._on_node_death, node)
        dispatch = self._loop.create_task(self._frontend.run())
        dispatch.add_done_callback(self._on_dispatch_end)
        watch = self._loop.create_task(self._watch_hangs())
        try:
            listen(self._socket)
            await self._http.serve_on(self._socket, on_ready)
        finally:
            dispatch.cancel()
            watch.cancel()
            if self._drain:
                self._drain.cancel()
            for worker in self._workers.processes:
                self._loop.remove_reader(worker.process.sentinel)
            for node in self._workers.nodes:
                self._loop.remove_reader(node.status)
            for queue in self._tokenizers:
                queue.close()
            self._replies.close()
            self._frontend.observer.close()
            self._loop = None
        if self._failure:
            raise self._failure

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
        """Accept no more, end the open requests, and let `serve` return. Any thread may call it.

        drain: first let the open requests finish, for `--drain-timeout`.
        """
        if loop := self._loop:
            with contextlib.suppress(RuntimeError):  # `serve` has just ended by itself
                loop.call_soon_threadsafe(self._stop, drain)

    def _stop(self, drain: bool) -> None:
        if drain and self._drain_s and self._frontend.num_open and not self._frontend.is_draining:
            self._drain = asyncio.create_task(self._finish_open())
        else:
            self._end(EngineError("the server is shutting down"))

    async def _finish_open(self) -> None:
        self._frontend.is_draining = True
        num_open = self._frontend.num_open
        logger.info("draining: %d prompts are open, for at most %g s", num_open, self._drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self._frontend.num_open:
                    await asyncio.sleep(DRAIN_CHECK_S)
        if num_open := self._frontend.num_open:
            logger.warning("%d prompts did not finish within --drain-timeout", num_open)
        self._end(EngineError("the server is shutting down"))

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

    def _on_death(self, worker: Worker) -> None:
        if self._loop:
            self._loop.remove_reader(worker.process.sentinel)
        self._fail(worker.death())

    def _on_node_death(self, node: NodeLink) -> None:
        if self._loop:
            self._loop.remove_reader(node.status)
        self._fail(node.death() or EngineError(f"{node.name} has ended"))

    def _on_dispatch_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            logger.error("replies cannot be delivered any more", exc_info=error)
            self._fail(EngineError(f"the API server failed ({type(error).__name__}: {error})"))

    def _fail(self, error: EngineError) -> None:
        if not self._http.should_exit:
            self._failure = error
            self._end(error)
