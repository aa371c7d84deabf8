"""How the supervisor tells what went wrong at the start, of workers that are mere pipes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.errors import StartupFailed
from minisgl.server.workers import Worker, Workers
from minisgl.utils.process import WorkerStatus


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.endpoints.remove()


def failed(workers: Workers, name: str, message: str) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    no_process: Any = None
    workers.processes.append(Worker(name=name, process=no_process, status=ours))
    WorkerStatus(theirs).failed(message)


def test_what_several_say_is_told_once(workers: Workers) -> None:
    for name in ("tokenizer-0", "tokenizer-1", "detokenizer"):
        failed(workers, name, "tokenizer.json does not load")
    with pytest.raises(StartupFailed) as raised:
        workers.wait_ready()
    assert str(raised.value) == "the tokenizer-0 could not start: tokenizer.json does not load"


def test_different_causes_are_all_told_in_order(workers: Workers) -> None:
    failed(workers, "engine", "no memory is left: 3.5 GiB are free")
    failed(workers, "tokenizer-0", "tokenizer.json does not load")
    failed(workers, "detokenizer", "no memory is left: 3.4 GiB are free")
    with pytest.raises(StartupFailed) as raised:
        workers.wait_ready()
    assert str(raised.value) == (
        "the engine could not start: no memory is left: 3.5 GiB are free; "
        "the tokenizer-0 could not start: tokenizer.json does not load"
    )
