"""The supervisor: from the command line to a serving process and back to nothing.

::

    this process   bind port, fetch checkpoint | import FastAPI ... wait | serve        | end them
    engine                                     | import torch, load ...  | step, step   |
    tokenizer(s)                               | load tokenizer          | text <-> ids |

The API server runs in this process. A worker's death shows at once as the end of its sentinel,
which the event loop watches: every open request is answered with an error, and the server exits
with code 1. Requested shutdown (Ctrl-C, SIGTERM, SIGHUP) exits with 0; a second Ctrl-C or
SIGTERM does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl import env
from minisgl.errors import ConfigError, EngineError
from minisgl.message import UserReply
from minisgl.runtime.node_map import ranks_of
from minisgl.runtime.nodes import (
    NodeLink,
    gather_nodes,
    given_of_node_0,
    join_node_0,
    settings_of,
    with_network,
)
from minisgl.runtime.signals import Signals, held
from minisgl.runtime.workers import Worker, Workers
from minisgl.server.address import bind, listen, url_of
from minisgl.server.args import ServerArgs
from minisgl.server.checkpoint import find_checkpoint
from minisgl.utils.files import forget
from minisgl.utils.logger import get_logger, setup_logging
from minisgl.utils.process import leave_start_to_no_collector
from minisgl.utils.start import StartClock, describe_start
from minisgl.utils.zmq import AsyncPullQueue, PushQueue

if TYPE_CHECKING:
    from minisgl.server.api.models import ServedModel

logger = get_logger(__name__)


def launch_server(
    args: ServerArgs,
    *,
    foreground: Callable[[str], object] | None = None,
    began: float | None = None,
) -> int:
    """Serve until told to stop, and return the exit code. Called in the main thread.

    foreground: runs in the main thread, with the server's URL, while the server runs beside it;
    its return is the request to stop. began: when the command did, on `time.monotonic`; by default
    now.
    """
    clock = StartClock(began)
    level = args.log_level or ("warning" if args.shell else None)
    if level:
        os.environ["MINISGL_LOG_LEVEL"] = level  # for the workers
    if args.log_format:
        os.environ["MINISGL_LOG_FORMAT"] = args.log_format
    with Signals() as signals:
        try:
            setup_logging("server", level=level)
            env.check()
            if args.dry_run:
                _dry_run(args, signals)
            elif args.node_rank:
                _serve_node(args, signals)
            else:
                _serve(args, signals, foreground, clock)
        except KeyboardInterrupt:
            logger.info("stopped" if args.node_rank else "stopped before it was ready")
        except (ConfigError, EngineError) as error:
            logger.error("%s", error)
            return 1
    return 0


def _dry_run(args: ServerArgs, signals: Signals) -> None:
    found = find_checkpoint(args)
    with _workers(signals) as workers:
        workers.start_engine(replace(args, model=str(found.folder), served_model_name=found.name))
        workers.start_text(found.folder, args.num_tokenizer, dry_run=True)
        workers.wait_ready()
        _say(workers.info["memory"])
        workers.wait_ended()


def _serve(
    args: ServerArgs,
    signals: Signals,
    foreground: Callable[[str], object] | None,
    clock: StartClock,
) -> None:
    with bind(args.host, args.http_port) as bound, _workers(signals) as workers:
        found = find_checkpoint(args)
        folder, name = found.folder, found.name
        if args.nnodes > 1:
            workers.nodes = gather_nodes(args, settings_of(args, folder))
            workers.endpoints = with_network(workers.endpoints, args, workers.nodes)
        logger.info("starting the engine and the tokenizer")
        clock.lap("launch")
        # First the engine: it imports torch, which takes longest.
        workers.start_engine(replace(args, model=str(folder), served_model_name=name))
        workers.start_text(folder, args.num_tokenizer)

        with held():  # the import system swallows what a signal raises in its callbacks
            from minisgl.server.api.models import ServedModel  # FastAPI, while the workers start

            model = ServedModel(name=name, defaults=found.defaults, created=int(time.time()))
            server = Server(workers, bound, model, args)
        workers.wait_ready()
        signals.check()
        leave_start_to_no_collector()
        server.on_workers_ready(clock)
        if foreground:
            with signals.lent():
                server.serve_beside(foreground)
        else:

            def on_ready() -> None:
                signals.first = server.stop
                _say(ready_text(name, url_of(bound), sum(clock.part_s.values())))

            asyncio.run(server.serve(on_ready))


def _serve_node(args: ServerArgs, signals: Signals) -> None:
    """Run this node's ranks for as long as node 0 serves."""
    if flags := given_of_node_0(args):
        logger.info("node 0 alone uses %s; this node does not", ", ".join(flags))
    with _workers(signals) as workers:
        folder = find_checkpoint(args).folder
        workers.nodes = [join_node_0(args, settings_of(args, folder))]
        workers.endpoints = with_network(workers.endpoints, args, workers.nodes)
        ranks = ranks_of(args, args.node_rank)
        logger.info(
            "starting ranks %d to %d; HTTP and tokenizers are node 0's", ranks[0], ranks[-1]
        )
        workers.start_engine(replace(args, model=str(folder)))
        workers.wait_ready()
        leave_start_to_no_collector()
        logger.info("this node is ready")
        workers.wait_ended()


@contextlib.contextmanager
def _workers(signals: Signals) -> Iterator[Workers]:
    """Workers that end with the block, at once on a second signal."""
    workers = Workers()
    signals.second = workers.kill
    reason = None
    try:
        yield workers
    except BaseException as error:
        reason = str(error) or "it was stopped"
        raise
    finally:
        signals.first = workers.kill  # they are asked to end already
        workers.end(reason)


class Server:
    """The API server over running workers. Mutable: it starts, may fail, and stops."""

    def __init__(
        self, workers: Workers, bound: socket.socket, model: ServedModel, args: ServerArgs
    ) -> None:
        from minisgl.server.api_server import create_app
        from minisgl.server.frontend import Frontend
        from minisgl.server.http import HttpServer
        from minisgl.server.telemetry.observe import Observer
        from minisgl.server.telemetry.tracing import create_tracer

        self._workers = workers
        self._socket = bound
        endpoints = workers.endpoints
        num_tokenizers = max(args.num_tokenizer, 1)
        self._tokenizers = [PushQueue(endpoints.tokenizer(i)) for i in range(num_tokenizers)]
        self._replies: AsyncPullQueue[UserReply] = AsyncPullQueue(endpoints.api, UserReply)
        tracer = create_tracer(args.otlp_endpoint, model.name) if args.otlp_endpoint else None
        observer = Observer(log_requests=args.log_requests, tracer=tracer)
        self._frontend = Frontend(
            self._tokenizers,
            self._replies,
            observer,
            num_ranks=args.tp // args.nnodes,
            max_queued=args.max_queued_requests,
        )
        self._http = HttpServer(create_app(self._frontend, model))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: EngineError | None = None

    def on_workers_ready(self, clock: StartClock) -> None:
        """The workers are ready: how much they take, and where the time went, for the log and for
        /metrics."""
        info = self._workers.info
        pool_tokens = info["num_pages"] * info["page_size"]
        self._frontend.context_length = min(info["max_seq_len"], pool_tokens)
        clock.lap_in_parts(info["start_s"], rest="others")
        self._frontend.observer.start_s = clock.part_s
        logger.info("started: %s", describe_start(clock.part_s))

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until `stop`. Raises EngineError if a worker or this process fails before that."""
        self._loop = asyncio.get_running_loop()
        for worker in self._workers.processes:
            self._loop.add_reader(worker.process.sentinel, self._on_death, worker)
        for node in self._workers.nodes:
            self._loop.add_reader(node.status, self._on_node_death, node)
        dispatch = self._loop.create_task(self._frontend.run())
        dispatch.add_done_callback(self._on_dispatch_end)
        try:
            listen(self._socket)
            await self._http.serve_on(self._socket, on_ready)
        finally:
            dispatch.cancel()
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

    def serve_beside(self, foreground: Callable[[str], object]) -> None:
        """`serve` in a thread while `foreground` has the main thread and its signals."""
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
        try:
            started.wait()
            if not failures:
                foreground(url_of(self._socket))
        finally:
            started.wait()
            self.stop()
            thread.join()
        if failures:
            raise failures[0]

    def stop(self) -> None:
        """Stop accepting, end what is open, and let `serve` return. Any thread may call it."""
        if loop := self._loop:
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                loop.call_soon_threadsafe(self._end, EngineError("the server is shutting down"))

    def _end(self, error: EngineError) -> None:
        error.status = 503
        self._frontend.fail_all(error)
        self._http.should_exit = True

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


def ready_text(name: str, url: str, seconds: float) -> str:
    """Where the server is, and the three things to try next; they need nothing but this install."""
    python = _interpreter()
    return f"""
Serving {name} on {url} (ready after {seconds:.1f} s; Ctrl-C stops it). In another terminal, try

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is a radix cache?"}}]}}'

  {python} -m minisgl.shell --url {url}

  {python} - <<'EOF'
  import httpx  # or the official client: openai.OpenAI(base_url="{url}/v1", api_key="none")
  body = {{"messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}
  answer = httpx.post("{url}/v1/chat/completions", json=body).json()
  print(answer["choices"][0]["message"]["content"])
  EOF

Every endpoint: {url}/docs
"""


def _say(text: str) -> None:
    """Print, whether or not somebody reads it: `| head` does not end a server."""
    try:
        print(text, flush=True)
    except OSError:
        forget(sys.stdout)


def _interpreter() -> str:
    """What to type for the Python that runs this: in a virtual environment, not just `python`."""
    if sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix:
        return "python"
    return min(sys.executable, os.path.relpath(sys.executable), key=len)
