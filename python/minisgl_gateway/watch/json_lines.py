"""The log as JSON (`--log-format json`), and lines of named values."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any


def log_fields(logger: logging.Logger, what: str, **fields: Any) -> None:
    """Log a line (level info) of named values: ``what a=1 b=x``; in JSON each is a key.

    Values that are None are left out.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    text = " ".join(f"{name}={value}" for name, value in given.items())
    logger.info("%s %s", what, text, extra={"minisgl_what": what, "minisgl_fields": given})


class JsonFormatter(logging.Formatter):
    """Writes time (UTC), level, process, pid, message, and the fields of `log_fields`."""

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
