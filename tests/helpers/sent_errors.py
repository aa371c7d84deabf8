"""Errors of each class that crosses a process, and a process that sends them.

It is a module of its own, because the process imports it, and pytest and torch take seconds.
"""

from __future__ import annotations

import sys

import msgspec

from minisgl.core import Failed
from minisgl.errors import (
    EngineError,
    InvalidRequest,
    InvalidSampling,
    NonFiniteLogits,
    PromptTooLong,
    RequestError,
    ServerBusy,
    WorkerDied,
    WorkerHung,
)

ERRORS: tuple[RequestError | EngineError, ...] = (
    InvalidRequest("wrong", param="n"),
    InvalidSampling("hot", param="temperature"),
    PromptTooLong("long", limit=8, got=9, param="prompt"),
    ServerBusy("full"),
    EngineError("broken"),
    WorkerDied("engine", -9),
    WorkerDied("engine", None),
    WorkerHung("tokenizer-0", "hangs"),
    NonFiniteLogits(),
)

if __name__ == "__main__":
    records = [Failed.of(uid, error) for uid, error in enumerate(ERRORS)]
    sys.stdout.buffer.write(msgspec.msgpack.encode(records))
