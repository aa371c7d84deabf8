"""What commands that serve have in common: their exit codes, their last requests, their words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Final

from minisgl import plugins
from minisgl.errors import ConfigError, EngineError
from minisgl.message.pooling import OnlyTask
from minisgl.runtime.signals import Signals
from minisgl.utils.files import forget
from minisgl.utils.http import goes_through_proxy
from minisgl.utils.logger import get_logger, setup_logging

logger = get_logger(__name__)


def run_serving(
    process: str,
    serve: Callable[[Signals], int],
    *,
    level: str | None,
    log_format: str | None,
    interrupted: int = 0,
) -> int:
    """Set up the log, call `serve` with signals handled, and return the exit code.

    process: the name of this process in the log. level, log_format: of the log, here and in child
    processes. interrupted: the exit code after a signal that came before the server was ready.
    A ConfigError or EngineError of `serve` is logged; the exit code is then 1.
    """
    for name, value in (("MINISGL_LOG_LEVEL", level), ("MINISGL_LOG_FORMAT", log_format)):
        if value:
            os.environ[name] = value
    with Signals() as signals:
        try:
            setup_logging(process, level=level)
            return serve(signals)
        except KeyboardInterrupt:
            logger.info("stopped before it was ready")
            return interrupted
        except (ConfigError, EngineError) as error:
            logger.error("%s", error)
            return 1


CHECK_S: Final = 0.05


async def finish_open(num_open: Callable[[], int], timeout_s: float) -> None:
    """Wait until no request is open, or for `timeout_s` (`--drain-timeout`).

    num_open: returns the number of open requests. The caller must refuse new ones.
    """
    if not timeout_s or not num_open():
        return
    logger.info("draining: %d requests are open, for at most %g s", num_open(), timeout_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while num_open():
                await asyncio.sleep(CHECK_S)
    if num_left := num_open():
        logger.warning("%d requests did not finish within --drain-timeout", num_left)


def say(text: str) -> None:
    """Print to stdout. The server goes on if the reader has left, as with `| head`."""
    try:
        print(text, flush=True)
    except OSError:
        forget(sys.stdout)


def ready_text(
    name: str,
    url: str,
    seconds: float,
    *,
    needs_key: bool = False,
    can_chat: bool = True,
    only_task: OnlyTask = "",
) -> str:
    """Return the server's URL with commands to try it, which a row of the table `start_lines` may
    write.

    seconds: the time of the start. needs_key: clients need an API key. can_chat: the model has a
    chat template; without one the command completes a text. only_task: of a model that writes none.
    """
    said = f"\nServing {name} on {url} (ready after {seconds:.1f} s; Ctrl-C stops it). "
    if more := plugins.find("start_lines", "ready"):
        asked = {"needs_key": needs_key, "can_chat": can_chat, "only_task": only_task}
        return said + str(more(url, **asked))
    curl = "curl --noproxy '*'" if goes_through_proxy(url) else "curl"
    path, prompt = "completions", '"prompt": "A radix cache is", "max_tokens": 30'
    if can_chat:
        path, prompt = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    json = f"-H 'Content-Type: application/json' -d '{{{prompt}}}'"
    return f"{said}Try\n\n  {curl} '{url}/v1/{path}' {json}\n"
