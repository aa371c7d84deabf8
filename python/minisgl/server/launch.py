"""The supervisor, which starts and ends the workers and the API server.

::

    this process   bind port, fetch checkpoint | import FastAPI ... wait | serve        | end them
    engine                                     | import torch, load ...  | step, step   |
    tokenizer(s)                               | load tokenizer          | text <-> ids |

The API server runs in this process (`minisgl.server.server`). If a worker dies, the exit code is 1,
or all workers start again (row `restarting` of `servers`). After Ctrl-C, SIGTERM or SIGHUP the exit
code is 0. SIGTERM first lets running requests finish, for `--drain-timeout`; a second Ctrl-C or
SIGTERM ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from minisgl import env, plugins
from minisgl.runtime.signals import Signals, held
from minisgl.runtime.workers import Workers
from minisgl.server.address import bind, url_of
from minisgl.server.args import ServerArgs
from minisgl.server.clients import Keys
from minisgl.server.command import ready_text, run_serving, say
from minisgl.server.model import find_model
from minisgl.utils.logger import get_logger
from minisgl.utils.start import StartClock

logger = get_logger(__name__)


def launch_server(
    args: ServerArgs,
    *,
    foreground: Callable[[str], int] | None = None,
    began: float | None = None,
    on_url: Callable[[str], None] | None = None,
    bound: socket.socket | None = None,
) -> int:
    """Serve until a request to stop, and return the exit code. Called in the main thread.

    foreground: called with the server's URL in the main thread, while the server runs in another
    thread. When it returns, the server stops, and its result is the exit code. began: when the
    command started, on `time.monotonic`; None is now. on_url: called with the server's URL when it
    serves; without it, the URL is printed. bound: the socket to listen on, of another process;
    without it, one is made.
    """
    clock = StartClock(began)

    def serve(signals: Signals) -> int:
        env.check()
        if args.dry_run:
            return _dry_run(args, signals)
        if 0 not in args.local_ranks:  # the machine of rank 0 serves HTTP
            code: int = plugins.need("nodes", "serve", "--node-rank")(args, signals)
            return code
        is_quiet = foreground is not None and args.log_level is None
        if is_quiet and (spinner := plugins.find("start_lines", "spinner")):
            is_here = args.model is None or os.path.exists(os.path.expanduser(args.model))
            with spinner(downloads=not is_here) as lines:
                return _serve(args, signals, foreground, clock, on_url, bound, lines)
        return _serve(args, signals, foreground, clock, on_url, bound)

    return run_serving(
        "server",
        serve,
        level=args.log_level or ("warning" if args.shell else None),
        log_format=args.log_format,
        interrupted=130 if foreground else 0,
    )


def _keys(args: ServerArgs) -> Keys | None:
    """Return the API keys of the options. Raises ConfigError, also if no package here checks keys:
    a server must not start without what it was asked for."""
    if args.api_key is None and args.api_key_file is None:
        return None
    flag = "--api-key" if args.api_key is not None else "--api-key-file"
    made: Keys = plugins.need("keys", "ring", flag)(args.api_key, args.api_key_file)
    return made


def _dry_run(args: ServerArgs, signals: Signals) -> int:
    _keys(args)
    model = find_model(args)
    folder = model.folder
    with workers_until_end(signals) as workers:
        workers.start_engine(model.resolved(args))
        workers.start_text(folder, args.num_tokenizer, dry_run=True)
        workers.wait_ready()
        say(workers.info["memory"])
        if model.only_task:
            say(f"  all but {model.only_task} is refused: the model is an encoder")
        elif not workers.info["has_chat_template"]:
            say("  chats are refused: the model has no usable chat template")
        workers.wait_ended()
    return 0


def _serve(
    args: ServerArgs,
    signals: Signals,
    foreground: Callable[[str], int] | None,
    clock: StartClock,
    on_url: Callable[[str], None] | None,
    bound: socket.socket | None,
    lines: Any = None,
) -> int:
    """Serve until asked to stop, and return the exit code. lines: shows the log until it is ready
    (a row of the table `start_lines`)."""
    tls = args.tls
    keys = _keys(args)
    on_line = lines.show if lines else None
    bound = bound or bind(args.host, args.http_port)
    with bound, workers_until_end(signals, on_line) as workers:
        model = find_model(args)
        folder = model.folder
        if lines:
            lines.begin()
        if args.num_local < args.tp:
            plugins.need("nodes", "gather", "--nnodes")(args, folder, workers)
        logger.info("starting the engine and the tokenizer")
        clock.lap("launch")

        def start_workers() -> None:
            # The engine comes first: its import of torch takes longest.
            workers.start_engine(model.resolved(args))
            workers.start_text(
                folder,
                args.num_tokenizer,
                tool_call_parser=args.tool_call_parser,
                media=args.media,
            )

        start_workers()

        # The workers start while a thread imports FastAPI. This one sees when a worker ends.
        importing = threading.Thread(target=_import_server, name="imports")
        importing.start()
        workers.wait_while(importing)
        with held():  # an import may swallow what a signal handler raises
            from minisgl.server.server import Server

            server_of = plugins.find("servers", "restarting")
            make = server_of(args, start_workers) if server_of else Server
            server: Server = make(workers, bound, model, args, keys, tls)
        workers.wait_ready()
        signals.check()
        gc.freeze()  # see `WorkerStatus.ready`
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
            told = ready_text(
                model.name,
                url,
                sum(clock.part_s.values()),
                needs_key=keys is not None,
                can_chat=workers.info["has_chat_template"],
                only_task=model.only_task,
            )
            say(told)

        asyncio.run(server.serve(on_ready))
        return 0


def _import_server() -> None:
    with contextlib.suppress(Exception):  # the main thread imports the same, and raises it
        import minisgl.server.server  # noqa: F401 - it only has to be loaded


@contextlib.contextmanager
def workers_until_end(
    signals: Signals, on_line: Callable[[str], None] | None = None
) -> Iterator[Workers]:
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
