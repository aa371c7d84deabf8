"""The supervisor, which starts and ends the workers and the API server.

::

    this process   bind port, fetch checkpoint | import FastAPI ... wait | serve        | end them
    engine                                     | import torch, load ...  | step, step   |
    tokenizer(s)                               | load tokenizer          | text <-> ids |

The API server runs in this process (`minisgl.server.server`). If a worker dies, the exit code is 1,
or with `--restart` all workers start again. After Ctrl-C, SIGTERM or SIGHUP the exit code is 0.
SIGTERM first lets running requests finish, for `--drain-timeout`; a second Ctrl-C or SIGTERM ends
everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from minisgl import env, plugins
from minisgl.runtime.signals import Signals, held
from minisgl.runtime.workers import Workers
from minisgl.server.address import bind, tls_context, url_of
from minisgl.server.args import ServerArgs
from minisgl.server.clients import Keys
from minisgl.server.command import ready_text, run_serving, say
from minisgl.server.model import find_checkpoint
from minisgl.utils.logger import get_logger
from minisgl.utils.process import freeze_start_objects
from minisgl.utils.start import StartClock
from minisgl_gateway.nodes.join import gather_nodes, join_node_0, with_network
from minisgl_gateway.nodes.ports import ranks_of
from minisgl_gateway.nodes.settings import given_of_node_0, settings_of

logger = get_logger(__name__)


def launch_server(
    args: ServerArgs,
    *,
    foreground: Callable[[str], int] | None = None,
    began: float | None = None,
    on_url: Callable[[str], None] | None = None,
) -> int:
    """Serve until a request to stop, and return the exit code. Called in the main thread.

    foreground: called with the server's URL in the main thread, while the server runs in another
    thread. When it returns, the server stops, and its result is the exit code. began: when the
    command started, on `time.monotonic`; None is now. on_url: called with the server's URL when it
    serves; without it, the URL is printed.
    """
    clock = StartClock(began)

    def serve(signals: Signals) -> int:
        env.check()
        if args.dry_run:
            return _dry_run(args, signals)
        if args.node_rank:
            try:
                _serve_node(args, signals)
            except KeyboardInterrupt:
                logger.info("stopped")
            return 0
        is_quiet = foreground is not None and args.log_level is None
        if is_quiet and (spinner := plugins.find("start_lines", "spinner")):
            is_here = args.model is None or Path(args.model).expanduser().exists()
            with spinner(downloads=not is_here) as lines:
                return _serve(args, signals, foreground, clock, on_url, lines)
        return _serve(args, signals, foreground, clock, on_url)

    return run_serving(
        "server",
        serve,
        level=args.log_level or ("warning" if args.shell else None),
        log_format=args.log_format,
        interrupted=130 if foreground else 0,
    )


def _keys(args: ServerArgs) -> Keys | None:
    """Return the API keys of the options. Raises ConfigError, also for an option that no package
    here can honour: a server must not start without what it was asked for."""
    if args.otlp_endpoint:
        plugins.need("prompt_watchers", "otlp", "--otlp-endpoint")
    if args.log_requests:
        plugins.need("prompt_watchers", "requests", "--log-requests")
    if args.api_key is None and args.api_key_file is None:
        return None
    flag = "--api-key" if args.api_key is not None else "--api-key-file"
    made: Keys = plugins.need("keys", "ring", flag)(args.api_key, args.api_key_file)
    return made


def _dry_run(args: ServerArgs, signals: Signals) -> int:
    _keys(args)
    folder = find_checkpoint(args).folder
    with _workers(signals) as workers:
        workers.start_engine(replace(args, model=str(folder)))
        workers.start_text(folder, args.num_tokenizer, dry_run=True)
        workers.wait_ready()
        say(workers.info["memory"])
        if not workers.info["has_chat_template"]:
            say("  chats are refused: the model has no usable chat template")
        workers.wait_ended()
    return 0


def _serve(
    args: ServerArgs,
    signals: Signals,
    foreground: Callable[[str], int] | None,
    clock: StartClock,
    on_url: Callable[[str], None] | None,
    lines: Any = None,
) -> int:
    """Serve until asked to stop, and return the exit code. lines: shows the log until it is ready
    (a row of the table `start_lines`)."""
    tls = tls_context(args.ssl_certfile, args.ssl_keyfile)
    keys = _keys(args)
    on_line = lines.show if lines else None
    with bind(args.host, args.http_port) as bound, _workers(signals, on_line) as workers:
        model = find_checkpoint(args)
        folder = model.folder
        if lines:
            lines.begin()
        if args.nnodes > 1:
            workers.nodes = gather_nodes(args, settings_of(args, folder))
            workers.endpoints = with_network(workers.endpoints, args, workers.nodes)
        logger.info("starting the engine and the tokenizer")
        clock.lap("launch")

        def start_workers() -> None:
            # The engine comes first: its import of torch takes longest.
            workers.start_engine(replace(args, model=str(folder)))
            workers.start_text(folder, args.num_tokenizer, tool_call_parser=args.tool_call_parser)

        start_workers()

        # The workers start while a thread imports FastAPI. This one sees when a worker ends.
        importing = threading.Thread(target=_import_server, name="imports")
        importing.start()
        workers.wait_while(importing)
        with held():  # an import may swallow what a signal handler raises
            from minisgl.server.server import Server

            server = Server(workers, bound, model, args, keys, tls, start_workers)
        workers.wait_ready()
        signals.check()
        freeze_start_objects()
        server.on_workers_ready(clock)
        if lines:
            lines.end()
        if foreground:
            with signals.lent():
                return server.serve_beside(foreground)

        def on_ready() -> None:
            signals.first = lambda: server.stop(drain=signals.number == signal.SIGTERM)
            url = url_of(bound, "https" if tls else "http")
            if on_url:
                on_url(url)
                return
            seconds, can_chat = sum(clock.part_s.values()), workers.info["has_chat_template"]
            say(ready_text(model.name, url, seconds, needs_key=keys is not None, can_chat=can_chat))

        asyncio.run(server.serve(on_ready))
        return 0


def _import_server() -> None:
    with contextlib.suppress(Exception):  # the main thread imports the same, and raises it
        import minisgl.server.server  # noqa: F401 - it only has to be loaded


def _serve_node(args: ServerArgs, signals: Signals) -> None:
    """Run this node's ranks for as long as node 0 serves."""
    if flags := given_of_node_0(args):
        logger.info("only node 0 uses %s; this node does not", ", ".join(flags))
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
        freeze_start_objects()
        logger.info("this node is ready")
        workers.wait_ended()


@contextlib.contextmanager
def _workers(signals: Signals, on_line: Callable[[str], None] | None = None) -> Iterator[Workers]:
    """Yield workers that end with the block, or at once after a second signal."""
    workers = Workers(on_line=on_line)
    signals.second = workers.kill
    reason = None
    try:
        yield workers
    except BaseException as error:
        reason = str(error) or "it was stopped"
        raise
    finally:
        signals.first = workers.kill  # they are already asked to end
        workers.end(reason)
