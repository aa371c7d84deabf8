"""Engines on several ranks."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from minisgl.engine import Engine, EngineConfig

T = TypeVar("T")

RANKS_S = 120.0
"""The longest time of all ranks' work: less than pytest's own limit of a test."""


def together(run: Callable[..., T], *columns: Iterable[Any], timeout_s: float = RANKS_S) -> list[T]:
    """Return the results of `run` side by side in threads, one for each row of `columns`.

    Fails the test, with the stacks of the threads that hang, if they take too long. A pool would
    wait for them for ever, even after pytest's own limit.
    """

    def fill(future: Future[T], row: tuple[Any, ...]) -> None:
        try:
            future.set_result(run(*row))
        except BaseException as error:
            future.set_exception(error)

    threads: dict[Future[T], threading.Thread] = {}
    for rank, row in enumerate(zip(*columns, strict=True)):
        future: Future[T] = Future()
        name = f"rank {rank}"
        threads[future] = threading.Thread(target=fill, args=(future, row), name=name, daemon=True)
        threads[future].start()
    done, late = wait(threads, timeout_s, FIRST_EXCEPTION)
    for future in done:
        future.result()  # the error of one may be why others hang
    frames = sys._current_frames()
    stacks = [
        f"{thread.name}:\n{''.join(traceback.format_stack(frames.get(thread.ident or 0)))}"
        for future, thread in threads.items()
        if future in late
    ]
    if stacks:
        pytest.fail(f"{len(stacks)} of {len(threads)} ranks hang\n" + "\n".join(stacks))
    return [future.result() for future in threads]


@contextmanager
def engines(folder: Path, store: Path, size: int, **options: Any) -> Iterator[list[Engine]]:
    """Yield the engines of all ranks, started side by side."""

    def start(rank: int) -> Engine:
        settings: dict[str, Any] = {
            "device": "cpu",
            "page_size": 4,
            "dtype": "float32",
            "num_pages": 96,
            "max_running_requests": 8,
            "max_prefill_length": 16,
        }
        return Engine(
            EngineConfig(
                model=str(folder), tp=size, rank=rank, store=f"file://{store}",
                **(settings | options),
            )
        )  # fmt: skip

    started = together(start, range(size))
    yield started
    together(Engine.close, started)
