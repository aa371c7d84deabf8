"""One log format for every process: time, level, which process, message; as text or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

from minisgl import env

_ROOT = "minisgl"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def log_fields(logger: logging.Logger, what: str, **fields: Any) -> None:
    """A line (level info) of named values: ``what a=1 b=x``; in JSON each is a key.

    None stands for "does not apply" and is left out.
    """
    said = {name: value for name, value in fields.items() if value is not None}
    text = " ".join(f"{name}={value}" for name, value in said.items())
    logger.info("%s %s", what, text, extra={"minisgl_what": what, "minisgl_fields": said})


def setup_logging(process: str, *, level: str | None = None) -> None:
    """Write this process's log to stderr, each line marked with `process` ("server", "engine").

    Called once by whoever owns the process (the server's entry points, the shell), never by a
    library door such as `LLM`, whose user owns the logging configuration. Warnings of other
    packages, uvicorn and asyncio say, go the same way, unless something listens to them already.
    """
    handler = logging.StreamHandler(sys.stderr)
    if env.log_format() == "json":
        handler.setFormatter(_JsonFormatter(process))
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


class _JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, process, pid, message; and the fields, if any."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "message": getattr(record, "minisgl_what", None) or record.getMessage(),
            **getattr(record, "minisgl_fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
