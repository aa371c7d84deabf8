"""Files of JSON lines that an option names, such as `--log-steps FILE`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from minisgl.core.plan import Plan
from minisgl.errors import ConfigError
from minisgl.message import StatusReply
from minisgl.runtime.observers import LoopObserver, Seat
from minisgl.utils.files import forget
from minisgl.utils.logger import get_logger
from minisgl_gateway.watch.steps import StepRecord, StepWatcher

logger = get_logger(__name__)

_encode: Final = msgspec.json.Encoder().encode


class LineFile:
    """Mutable: it owns the file. Only this user may read a file that it makes. A disk that is full
    ends the file with a warning, not the engine. A file that is there at the start becomes
    FILE.before; what a link such as /dev/stdout names is written anew.

    most_bytes: at this size the file is renamed to FILE.1 and begins again; None for no limit.
    """

    def __init__(self, option: str, path: Path, most_bytes: int | None = None) -> None:
        """Raises ConfigError, which names the option, if the file cannot be written."""
        self._option, self._path, self._most_bytes = option, path, most_bytes
        self._older, self._has_ended = Path(f"{path}.1"), False
        try:
            if path.is_file() and not path.is_symlink():  # of an engine that died, or drains
                path.replace(f"{path}.before")
                if most_bytes is not None:
                    self._older.unlink(missing_ok=True)
            self._begin()
        except OSError as error:
            raise ConfigError(f"{option} {path}: {error.strerror or error}") from error

    def _begin(self) -> None:
        self._path.touch(0o600)
        self._file, self._num_bytes = self._path.open("wb"), 0

    def write(self, record: Any) -> None:
        self.write_line(_encode(record))

    def write_line(self, json: bytes) -> None:
        if self._has_ended:
            return
        try:
            if self._most_bytes is not None and self._num_bytes + len(json) >= self._most_bytes:
                self._file.close()
                os.replace(self._path, self._older)
                self._begin()
            self._num_bytes += self._file.write(json + b"\n")
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Write the buffer to the disk, so that the file is complete."""
        try:
            if not self._has_ended:
                self._file.flush()
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _end(self, error: OSError) -> None:
        logger.warning("%s ends: %s: %s", self._option, self._path, error.strerror)
        self._has_ended = True
        if not self._file.closed:
            forget(self._file)


class StepLog(StepWatcher, LoopObserver):
    """``--log-steps``: one JSON line per step. The file is complete when the loop is idle."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        super().__init__()
        self._file = LineFile("--log-steps", path)

    def attach(self, seat: Seat) -> None:
        seat.meter.watchers.append(self)

    def stepped(self, record: StepRecord, plan: Plan) -> None:
        self._file.write(record)

    def reported(self, report: StatusReply) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
