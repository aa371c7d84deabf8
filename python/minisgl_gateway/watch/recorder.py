"""`--record FILE`: keeps the newest requests and steps of the engine in two files.

FILE has JSON lines. Each is an object with one key:

    config    the scheduler's settings, and whether steps overlap
    frame     a `minisgl_gateway.watch.xray.Frame`; the page's X-ray opens such a file
    arrival   a request: turn, at_s (since the start), uid, input_length, hash_ids, max_tokens,
              priority, share, scored (the prompt's log-probabilities are wanted), has_grammar,
              adapter (its digest, or null), num_output (tokens that another engine has made),
              block_tokens
    compiled  the grammar of a request is compiled, so it may start: turn, uid
    leave     a client left, or a stop string ended its text: turn, uid, num_tokens (null: all)
    end       a request has ended: uid, output_length, reason, cached_tokens, queued_s, prefill_s,
              decode_s, all_hash_ids (of the prompt and the output together), is_refused

hash_ids: one digest for each block of 16 tokens, of the block and all before it; blocks are smaller
if the pages of the KV cache are no multiple (`block_tokens`). Requests with a common prefix have
common digests. Their key is drawn at the start and written nowhere, so no text can be read or
guessed from them. `turn` counts the turns of the loop from 0. `minisgl replay FILE` sends the same
requests to a server; with `--plans` the scheduler alone plans them again.

At `SEGMENT_BYTES` FILE is renamed to FILE.1, and a new FILE begins. What an engine finds as FILE
when it starts becomes FILE.before.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.core.event import Accepted, Event, Failed, Finished, Token
from minisgl.message import (
    AbortMsg,
    CompiledMsg,
    SchedulerMsg,
    StopMsg,
    UserMsg,
    ids_from_bytes,
)
from minisgl.runtime.observers import LoopObserver, Seat
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.loop import Inbox, Outbox
from minisgl_gateway.watch.line_file import LineFile
from minisgl_gateway.watch.xray import XRay

SEGMENT_BYTES: Final = 32 << 20
BLOCK_TOKENS: Final = 16


class Recorder(LoopObserver):
    """`--record`. Mutable: it keeps the outputs of the requests that have not ended."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._file = LineFile("--record", path, SEGMENT_BYTES)
        self._key = secrets.token_bytes(16)
        self._block_tokens = BLOCK_TOKENS
        self._began = time.perf_counter()
        self._open: dict[int, tuple[UserMsg, list[int]]] = {}  # by uid, with the output so far
        self._new: set[int] = set()  # neither accepted nor refused yet

    def attach(self, seat: Seat) -> None:
        XRay.at(seat, self.frame)

    def inbox(self, inbox: Inbox) -> Inbox:
        return RecordedInbox(inbox, self)

    def outbox(self, outbox: Outbox) -> Outbox:
        return RecordedOutbox(outbox, self)

    def frame(self, data: bytes) -> None:
        """Write an encoded frame. The file is then complete up to it."""
        self._file.write_line(b'{"frame":' + data + b"}")
        self._file.flush()

    def begin(self, config: SchedulerConfig, *, overlap: bool) -> None:
        """Write the settings that plans depend on."""
        self._block_tokens = math.gcd(BLOCK_TOKENS, config.page_size)  # pages are whole blocks
        self._file.write({"config": {**asdict(config), "overlap": overlap}})

    def arrived(self, turn: int, message: UserMsg) -> None:
        output: list[int] = ids_from_bytes(message.output or b"").tolist()
        self._open[message.uid] = message, output
        self._new.add(message.uid)
        arrival = {
            "turn": turn,
            "at_s": round(time.perf_counter() - self._began, 6),
            "uid": message.uid,
            "input_length": len(message.ids) // 4,
            "hash_ids": self._hash_ids(message.ids, message.namespace),
            "max_tokens": message.sampling.max_tokens,
            "priority": message.priority,
            "share": message.share,
            "scored": message.sampling.prompt_logprobs is not None,
            "has_grammar": bool(message.grammar),
            "adapter": message.adapter and message.adapter.digest,
            "num_output": len(output),
            "block_tokens": self._block_tokens,
        }
        if message.sampling.pooling:
            arrival["pooling"] = message.sampling.pooling
        self._file.write({"arrival": arrival})

    def compiled(self, turn: int, message: CompiledMsg) -> None:
        self._file.write({"compiled": {"turn": turn, "uid": message.uid}})

    def left(self, turn: int, message: AbortMsg | StopMsg) -> None:
        num_tokens = message.num_tokens if isinstance(message, StopMsg) else None
        self._file.write({"leave": {"turn": turn, "uid": message.uid, "num_tokens": num_tokens}})

    def accepted(self, event: Accepted) -> None:
        self._new.discard(event.uid)

    def wrote(self, event: Token) -> None:
        if event.uid in self._open:
            self._open[event.uid][1].append(event.id)

    def ended(self, event: Finished | Failed) -> None:
        end: dict[str, Any] = {"uid": event.uid, "reason": "error", "output_length": 0}
        message, output = self._open.pop(event.uid, (None, []))
        if event.uid in self._new:
            self._new.remove(event.uid)
            end["is_refused"] = True
        if isinstance(event, Finished):
            if message:
                ids = np.array(output[: event.num_output_tokens], "<i4").tobytes()
                end["all_hash_ids"] = self._hash_ids(message.ids + ids, message.namespace)
            end |= {
                "reason": event.reason,
                "output_length": event.num_output_tokens,
                "cached_tokens": event.num_cached_tokens,
                "queued_s": round(event.queued_s, 6),
                "prefill_s": round(event.prefill_s, 6),
                "decode_s": round(event.decode_s, 6),
            }
        self._file.write({"end": end})

    def close(self) -> None:
        self._file.close()

    def _hash_ids(self, ids: bytes, namespace: str) -> list[int]:
        digest = hashlib.blake2b(namespace.encode(), digest_size=6, key=self._key).digest()
        hashes = []
        for start in range(0, len(ids), 4 * self._block_tokens):
            block = digest + ids[start : start + 4 * self._block_tokens]
            digest = hashlib.blake2b(block, digest_size=6, key=self._key).digest()
            hashes.append(int.from_bytes(digest, "little"))
        return hashes


class RecordedInbox:
    """An inbox whose messages are recorded. Mutable: it counts the turns."""

    def __init__(self, inbox: Inbox, recorder: Recorder) -> None:
        self._inbox, self._recorder = inbox, recorder
        self._turn = -1

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        messages = self._inbox.take(timeout_s)
        self._turn += 1
        for message in messages:
            if isinstance(message, UserMsg):
                self._recorder.arrived(self._turn, message)
            elif isinstance(message, CompiledMsg):
                self._recorder.compiled(self._turn, message)
            elif isinstance(message, AbortMsg | StopMsg):
                self._recorder.left(self._turn, message)
        return messages


class RecordedOutbox:
    """An outbox whose tokens and ends of requests are recorded."""

    def __init__(self, outbox: Outbox, recorder: Recorder) -> None:
        self._outbox, self._recorder = outbox, recorder

    def send(self, events: list[Event]) -> None:
        self._outbox.send(events)
        for event in events:
            if isinstance(event, Token):
                self._recorder.wrote(event)
            elif isinstance(event, Accepted):
                self._recorder.accepted(event)
            elif isinstance(event, Finished | Failed):
                self._recorder.ended(event)

    def pong(self, seq: int) -> None:
        self._outbox.pong(seq)
