"""Runs a command that serves, from its start to its exit code."""

from __future__ import annotations

import os
from collections.abc import Callable

from minisgl.errors import ConfigError, EngineError
from minisgl.runtime.signals import Signals
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
