"""`--record FILE`: the flight recorder, a ring on disk of the engine's requests and steps.

JSON lines, each an object with one key:

    frame     a `minisgl.scheduler.xray.Frame`; the page's X-ray opens such a file
    arrival   a request: at_s (since the start), uid, input_length, hash_ids, max_tokens, priority
    end       how it ended: uid, output_length, reason, cached_tokens, queued_s, prefill_s, decode_s

hash_ids are digests of the prompt's blocks of 16 tokens, each with all before it, under a key that
is drawn at the start and written nowhere: requests with a common prefix have common ones, and no
text can be read or guessed from them. `minisgl replay FILE` asks a server for the same again.

The ring is FILE and, once that is `SEGMENT_BYTES` long, FILE.1 with what came before.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from minisgl.core.event import Event, Failed, Finished
from minisgl.errors import ConfigError
from minisgl.message import SchedulerMsg, UserMsg
from minisgl.scheduler.loop import Inbox, Outbox
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

SEGMENT_BYTES: Final = 32 << 20
BLOCK_TOKENS: Final = 16

_encode: Final = msgspec.json.Encoder().encode


class Recorder:
    """Mutable: it owns the file. A disk that is full ends the recording, not the engine."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._path = path
        self._key = secrets.token_bytes(16)
        self._began = time.perf_counter()
        self._num_bytes = 0
        try:
            path.with_name(path.name + ".1").unlink(missing_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror or error}") from error

    def frame(self, data: bytes) -> None:
        """Write an encoded frame, and hand the file's buffer to the system."""
        self._write(b'{"frame":' + data + b"}\n")
        if not self._file.closed:
            self._file.flush()

    def arrived(self, message: UserMsg) -> None:
        arrival = {
            "at_s": round(time.perf_counter() - self._began, 6),
            "uid": message.uid,
            "input_length": len(message.ids) // 4,
            "hash_ids": self._hash_ids(message.ids, message.namespace),
            "max_tokens": message.sampling.max_tokens,
            "priority": message.priority,
        }
        self._write(_encode({"arrival": arrival}) + b"\n")

    def ended(self, event: Finished | Failed) -> None:
        end: dict[str, Any] = {"uid": event.uid, "reason": "error", "output_length": 0}
        if isinstance(event, Finished):
            end |= {
                "reason": event.reason,
                "output_length": event.num_output_tokens,
                "cached_tokens": event.num_cached_tokens,
                "queued_s": round(event.queued_s, 6),
                "prefill_s": round(event.prefill_s, 6),
                "decode_s": round(event.decode_s, 6),
            }
        self._write(_encode({"end": end}) + b"\n")

    def close(self) -> None:
        self._file.close()

    def _hash_ids(self, ids: bytes, namespace: str) -> list[int]:
        digest = hashlib.blake2b(namespace.encode(), digest_size=6, key=self._key).digest()
        hashes = []
        for start in range(0, len(ids), 4 * BLOCK_TOKENS):
            block = digest + ids[start : start + 4 * BLOCK_TOKENS]
            digest = hashlib.blake2b(block, digest_size=6, key=self._key).digest()
            hashes.append(int.from_bytes(digest, "little"))
        return hashes

    def _write(self, line: bytes) -> None:
        if self._file.closed:
            return
        try:
            if self._num_bytes + len(line) > SEGMENT_BYTES:
                self._file.close()
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("wb")
                self._num_bytes = 0
            self._file.write(line)
            self._num_bytes += len(line)
        except OSError as error:
            logger.warning("--record ends: %s: %s", self._path, error.strerror)
            self._file.close()


class RecordedInbox:
    """An inbox whose requests are recorded."""

    def __init__(self, inbox: Inbox, recorder: Recorder) -> None:
        self._inbox, self._recorder = inbox, recorder

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        messages = self._inbox.take(timeout_s)
        for message in messages:
            if isinstance(message, UserMsg):
                self._recorder.arrived(message)
        return messages


class RecordedOutbox:
    """An outbox whose ends of requests are recorded."""

    def __init__(self, outbox: Outbox, recorder: Recorder) -> None:
        self._outbox, self._recorder = outbox, recorder

    def send(self, events: list[Event]) -> None:
        self._outbox.send(events)
        for event in events:
            if isinstance(event, Finished | Failed):
                self._recorder.ended(event)

    def pong(self, seq: int) -> None:
        self._outbox.pong(seq)
