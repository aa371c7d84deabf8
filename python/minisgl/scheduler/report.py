"""The meter's numbers for people: a status line in the log, a file with a line per step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import msgspec

from minisgl.errors import ConfigError
from minisgl.message import StatusReply
from minisgl.scheduler.meter import StepRecord
from minisgl.utils.files import forget
from minisgl.utils.logger import get_logger, log_fields

logger = get_logger(__name__)

LINE_EVERY_S: Final = 5.0


class StatusLine:
    """Logs a line every `LINE_EVERY_S` at most, and only when steps ran since the last.

    Rates are per second of the loop's busy time, so pauses do not lower them; `busy` is that
    time's share. Mutable: it remembers the report of the last line.
    """

    def __init__(self) -> None:
        self._last: StatusReply | None = None
        self._last_at = time.monotonic()

    def __call__(self, now: StatusReply) -> None:
        at = time.monotonic()
        seconds = at - self._last_at
        if self._last is not None and seconds < LINE_EVERY_S:
            return
        last = self._last
        if now.num_steps == (last.num_steps if last else 0):
            return
        busy = sum(now.part_s) - (sum(last.part_s) if last else 0.0)

        def gained(name: str) -> int:
            return int(getattr(now, name)) - (int(getattr(last, name)) if last else 0)

        prompt, cached = gained("num_prompt_tokens"), gained("num_cached_tokens")
        log_fields(
            logger,
            "status",
            running=now.num_running,
            waiting=now.num_waiting,
            prefill_tokens_per_s=round(gained("num_prefill_tokens") / busy),
            decode_tokens_per_s=round(gained("num_output_tokens") / busy),
            kv_used=round(now.num_used_pages / now.num_pages, 3),
            hit_rate=round(cached / prompt, 3) if prompt else None,
            retractions=gained("num_retractions"),
            steps=gained("num_steps"),
            busy=round(min(busy / seconds, 1.0), 3),
        )
        self._last, self._last_at = now, at


class StepLog:
    """``--log-steps``: one JSON line per step. Mutable: it owns the file.

    A disk that is full ends the file with a warning, not the engine.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--log-steps {path}: {error.strerror or error}") from error
        self._path = path
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, record: StepRecord) -> None:
        try:
            self._file.write(self._encode(record) + b"\n")
        except OSError as error:
            self._give_up(error)

    def flush(self, report: StatusReply) -> None:
        """Write out the buffer with each report, so that the file is complete when the loop is
        idle."""
        self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("--log-steps ends: %s: %s", self._path, error.strerror)
        forget(self._file)
