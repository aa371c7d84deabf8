"""One log format for all processes: time, level, process, message."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from minisgl import env, plugins

_ROOT = "minisgl"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, below that of this package. name: its ``__name__``."""
    is_ours = name.partition(".")[0] == _ROOT
    return logging.getLogger(name if is_ours else f"{_ROOT}.{name}")


def setup_logging(process: str, *, level: str | None = None) -> None:
    """Write this process's log to stderr. process: its name in each line ("server", "engine").

    The entry point of a process (server, worker, shell) calls this once. `LLM` does not, because
    its user configures logging. Warnings of other packages (uvicorn, asyncio) are written in the
    same way, unless they have a handler already, as huggingface_hub has. Raises ConfigError for
    JSON that nothing writes.
    """
    handler = logging.StreamHandler(sys.stderr)
    if env.log_format() == "json":
        create_formatter = plugins.need("servers", "json_lines", "--log-format json")
        handler.setFormatter(create_formatter(process))
    else:
        handler.setFormatter(
            logging.Formatter(
                f"%(asctime)s %(levelname).1s [{process}] %(message)s", datefmt="%H:%M:%S"
            )
        )
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel((level or env.log_level()).upper())
    logger.propagate = False
    if not (others := logging.getLogger()).handlers:
        others.addHandler(handler)
        handler.addFilter(lambda record: not record.name.startswith("huggingface_hub"))


class _Teller(logging.Handler):
    def __init__(self, tell: Callable[[str], None], written: int) -> None:
        super().__init__()
        self._tell, self._written = tell, written

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < self._written:
            self._tell(record.getMessage())
        elif os.isatty(2) and os.environ.get("TERM") != "dumb":
            os.write(2, b"\r\x1b[K")


def tell_lines(tell: Callable[[str], None]) -> Callable[[], None]:
    """Call `tell` with each line of level info or above that is not written.

    If a terminal shows that line, a line that is written takes its place. Returns a function that
    ends this. Call it after `setup_logging`.
    """
    logger = logging.getLogger(_ROOT)
    level, teller = logger.level, _Teller(tell, logger.level)
    for written in logger.handlers:
        written.setLevel(level)
    logger.handlers.insert(0, teller)  # before those that write
    logger.setLevel(min(level, logging.INFO))

    def end() -> None:
        logger.removeHandler(teller)
        logger.setLevel(level)

    return end
