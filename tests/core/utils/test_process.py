"""A worker reports its start once, and ends with an exit code."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from minisgl.errors import PEER_LOST_EXIT, CheckpointError, PeerLost, WorkerDied
from minisgl.utils.process import (
    Ready,
    StartFailed,
    WorkerStatus,
    receive_status,
    run_worker,
)


def _start(
    body: Callable[[WorkerStatus], None],
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_worker, args=("test", theirs, body, 0.0), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(folder: str, status: WorkerStatus) -> None:
    status.ready({"pid": os.getpid(), "sizes": [1, 2]})
    try:
        time.sleep(60)
    finally:
        Path(folder, "cleaned").touch()


def _swallow(status: WorkerStatus) -> None:
    """As a callback of the import system does."""
    print("started", flush=True)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def _crash(status: WorkerStatus) -> None:
    status.ready({})
    raise KeyError("lost")


def _fail(error: Exception, status: WorkerStatus) -> None:
    raise error


class _ToldToEnd(CheckpointError):
    """Its supervisor asks a worker to end while it says what went wrong."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "no weights"


def _fail_when_told_to_end(status: WorkerStatus) -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise _ToldToEnd


def _return(status: WorkerStatus) -> None:
    status.ready({})


def _die(status: WorkerStatus) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigterm_cleans_up_and_a_terminals_signals_are_ignored(tmp_path: Path) -> None:
    process, connection = _start(partial(_serve, str(tmp_path)))
    status = receive_status(connection)
    assert status == Ready(info={"pid": process.pid, "sizes": [1, 2]})
    assert process.pid is not None
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(process.pid, number)
    process.join(0.2)
    assert process.is_alive()
    process.terminate()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize(
    ("error", "message", "is_consequence"),
    [
        (CheckpointError("no weights in this folder"), "no weights in this folder", False),
        (RuntimeError("what is this"), "RuntimeError: what is this", False),
        (PeerLost("a rank is gone"), "a rank is gone", True),
    ],
)
def test_failed_start(error: Exception, message: str, is_consequence: bool) -> None:
    process, connection = _start(partial(_fail, error))
    expected = StartFailed(message=message, is_consequence=is_consequence)
    assert receive_status(connection) == expected
    process.join(60)
    assert process.exitcode == (PEER_LOST_EXIT if is_consequence else 1)
    death = str(WorkerDied("engine-0", process.exitcode))
    assert ("has lost another rank" in death) == is_consequence


def test_a_failure_ends_the_process_at_once_also_after_sigterm() -> None:
    process, connection = _start(_fail_when_told_to_end)
    assert receive_status(connection) == StartFailed(message="no weights")
    process.join(30)  # not for its thread, which sleeps longer
    assert process.exitcode == 1


def test_sigterm_before_ready_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    process, _ = _start(_swallow)
    deadline = time.monotonic() + 60
    while "started" not in capfd.readouterr().out and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    process.join(60)
    assert process.exitcode == 0


def test_crash_after_start(capfd: pytest.CaptureFixture[str]) -> None:
    process, connection = _start(_crash)
    assert receive_status(connection) == Ready(info={})
    process.join(60)
    assert process.exitcode == 1
    log = capfd.readouterr().err
    assert "[test]" in log
    assert "KeyError: 'lost'" in log
    assert log.count("Traceback") == 1


def test_normal_end() -> None:
    process, connection = _start(_return)
    assert receive_status(connection) == Ready(info={})
    process.join(60)
    assert process.exitcode == 0


def test_death_before_report_is_seen() -> None:
    process, connection = _start(_die)
    with pytest.raises(EOFError):
        receive_status(connection)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _stick(status: WorkerStatus) -> None:
    """Wait in native code, which no signal interrupts."""
    status.ready({"pid": os.getpid()})
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def _compute(status: WorkerStatus) -> None:
    """Hold the interpreter's lock for minutes, so that no thread can watch the parent."""
    status.bound_native_code(1.0)
    status.ready({"pid": os.getpid()})
    print((10 ** (10**9)) % 7)


_PARENT = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from test_process import _compute, _stick, receive_status, _start
if __name__ == "__main__":
    process, connection = _start(_compute if {case!r} == "computes" else _stick)
    pid = receive_status(connection).info["pid"]
    fork = os.fork() if {case!r} == "beside a fork" else None
    if fork == 0:
        os.closerange(0, 3)
        signal.pause()
    if {case!r} == "asked to end":
        time.sleep(0.3)  # it is stuck by then
        process.terminate()
        process.join(0.5)
    if {case!r} == "computes":
        time.sleep(0.3)
    print(pid, fork or 0, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("case", ["alone", "beside a fork", "asked to end", "computes"])
def test_a_stuck_worker_ends_with_its_killed_parent(tmp_path: Path, case: str) -> None:
    """A process that the parent forked has the parent's end of every pipe, and may live on."""
    script = tmp_path / "parent.py"
    script.write_text(_PARENT.format(tests=str(Path(__file__).parent), case=case))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        worker, fork = map(int, parent.stdout.readline().split())
        assert parent.wait(60) == -signal.SIGKILL
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(worker).wait(20)
        finally:
            if fork:
                os.kill(fork, signal.SIGKILL)
