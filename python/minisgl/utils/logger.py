"""One log line format for every process: time, level, which process, message."""

from __future__ import annotations

import logging
import sys

from minisgl import env

_ROOT = "minisgl"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def setup_logging(process: str, *, level: str | None = None) -> None:
    """Write this process's log to stderr, each line marked with `process` ("scheduler-0", "api").

    Called once by whoever owns the process (the server's entry points, the shell), never by a
    library door such as `LLM`, whose user owns the logging configuration.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s %(levelname).1s [{process}] %(message)s", datefmt="%H:%M:%S"
        )
    )
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel((level or env.log_level()).upper())
    logger.propagate = False
