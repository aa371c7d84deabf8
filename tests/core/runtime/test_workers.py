"""The supervisor reports why a start failed. The workers are only pipes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest

from minisgl.errors import PEER_LOST_EXIT, CheckpointError, StartupFailed, WorkerDied
from minisgl.runtime.worker import Worker, main_module_hidden
from minisgl.runtime.workers import Peer, Workers, _cause
from minisgl.utils.process import WorkerStatus


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.endpoints.remove()


def started(workers: Workers, name: str) -> WorkerStatus:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    no_process: Any = None
    workers.processes.append(Worker(name=name, process=no_process, status=ours))
    return WorkerStatus(theirs, spawned_at=0.0)


def failed(workers: Workers, name: str, message: str, *, is_consequence: bool = False) -> None:
    started(workers, name).failed(message, is_consequence=is_consequence)


def test_a_cause_of_several_workers_is_reported_once(workers: Workers) -> None:
    for name in ("tokenizer-0", "tokenizer-1", "detokenizer"):
        failed(workers, name, "tokenizer.json does not load")
    with pytest.raises(StartupFailed) as raised:
        workers.wait_ready()
    assert str(raised.value) == "the tokenizer-0 could not start: tokenizer.json does not load"


def test_different_causes_are_all_reported_in_order(workers: Workers) -> None:
    failed(workers, "engine", "no memory is left: 3.5 GiB are free")
    failed(workers, "tokenizer-0", "tokenizer.json does not load")
    failed(workers, "detokenizer", "no memory is left: 3.4 GiB are free")
    with pytest.raises(StartupFailed) as raised:
        workers.wait_ready()
    assert str(raised.value) == (
        "the engine could not start: no memory is left: 3.5 GiB are free; "
        "the tokenizer-0 could not start: tokenizer.json does not load"
    )


def test_a_consequence_of_a_failure_is_not_reported(workers: Workers) -> None:
    failed(workers, "engine-0", "another rank has ended", is_consequence=True)
    failed(workers, "engine-1", "the weights are damaged")
    with pytest.raises(StartupFailed) as raised:
        workers.wait_ready()
    assert str(raised.value) == "the engine-1 could not start: the weights are damaged"


def test_the_cause_may_be_reported_after_its_consequence(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.runtime.workers.CAUSE_S", 60.0)
    failed(workers, "engine-0", "another rank has ended", is_consequence=True)
    late = started(workers, "engine-1")
    threading.Timer(0.1, late.failed, ["the weights are damaged"]).start()
    with pytest.raises(StartupFailed) as raised:
        workers.wait_ready()
    assert str(raised.value) == "the engine-1 could not start: the weights are damaged"


def test_a_consequence_is_reported_if_no_cause_is(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.runtime.workers.CAUSE_S", 0.1)
    silent = started(workers, "engine-0")
    failed(workers, "engine-1", "rank 1 of 2: no connection", is_consequence=True)
    with pytest.raises(StartupFailed) as raised:
        workers.wait_ready()
    assert str(raised.value) == "the engine-1 could not start: rank 1 of 2: no connection"
    assert not silent.is_reported


def _stuck(status: WorkerStatus) -> None:
    """As a rank in a collective whose peer is gone: signals change nothing."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(60)


def _broken(status: WorkerStatus) -> None:
    raise CheckpointError("the weights are damaged")


def test_a_failed_start_ends_the_others_without_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = Workers()
    workers._start("engine-0", _stuck)
    workers._start("engine-1", _broken)
    try:
        with pytest.raises(StartupFailed, match="the engine-1 could not start: the weights are da"):
            workers.wait_ready()
    finally:
        began = time.monotonic()
        workers.end("a reason")
    assert time.monotonic() - began < 30
    assert workers.processes[0].process.exitcode == -signal.SIGKILL
    assert caplog.text == ""


def test_threads_that_start_workers_leave_the_main_module(workers: Workers) -> None:
    main = sys.modules["__main__"]
    inside = [threading.Event(), threading.Event()]
    go_on = threading.Event()

    def start(index: int) -> None:
        with main_module_hidden():
            assert sys.modules["__main__"] is not main
            inside[index].set()
            go_on.wait(60)

    threads = [threading.Thread(target=start, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    while not any(event.is_set() for event in inside):
        time.sleep(0.01)
    time.sleep(0.05)
    assert sum(event.is_set() for event in inside) == 1  # the other waits
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert all(event.is_set() for event in inside)
    assert sys.modules["__main__"] is main


def test_the_death_of_a_worker_names_the_cause(workers: Workers) -> None:
    """The one that a signal killed, not the rank that lost it."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=sys.exit, args=(PEER_LOST_EXIT,)),
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,)),
    ]
    for index, process in enumerate(processes):
        process.start()
        status, _ = multiprocessing.Pipe(duplex=False)
        workers.processes.append(Worker(name=f"engine-{index}", process=process, status=status))
    processes[1].kill()
    for process in processes:
        process.join()
    with pytest.raises(WorkerDied, match="engine-1 process was killed by signal 9"):
        workers.check()


def test_an_error_is_the_cause_rather_than_an_end_without_one() -> None:
    deaths = [WorkerDied("engine-0", 0), WorkerDied("engine-1", None), WorkerDied("engine-2", 1)]
    assert _cause(deaths).worker == "engine-2"
    assert _cause([*deaths, WorkerDied("engine-3", -9)]).worker == "engine-3"
    assert _cause(deaths[:2]).worker == "engine-0"


def test_a_worker_that_ends_unasked_has_died(workers: Workers) -> None:
    process = multiprocessing.get_context("spawn").Process(target=sys.exit)
    process.start()
    status, _ = multiprocessing.Pipe(duplex=False)
    workers.processes.append(Worker(name="engine-0", process=process, status=status))
    process.join()
    with pytest.raises(WorkerDied, match="the engine-0 process ended with exit code 0"):
        workers.check()


def test_other_nodes_get_the_reason_of_the_end(workers: Workers) -> None:
    for reason in ("engine-1 was killed", None):
        node = create_autospec(Peer, instance=True)
        workers.nodes = [node]
        workers.end(reason)
        node.leave.assert_called_once_with(reason)
        node.close.assert_called_once_with()
        workers.nodes = ()
