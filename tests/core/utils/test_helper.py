"""Helper processes: their bounds, their ends, and what a next question gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from minisgl.utils.helper import Helper, HelperEnded, packed

ASKER = """
import sys
from minisgl.utils.helper import Helper, packed
helper = Helper("helpers.answering")
print(helper.ask(packed(["process", 0]), 9), flush=True)
helper.ask(packed(["hold", 0]), 60)
"""


def new() -> Helper:
    return Helper("helpers.answering")


def ask(helper: Helper, *question: Any, cpu_s: float = 9.0) -> Any:
    return helper.ask(packed(question), cpu_s)


def test_questions_of_any_size_and_text() -> None:
    helper = new()
    for question in (["a \ud800 é \0"], ["x" * 3_000_000], [None, 1.5, {"k": [True]}]):
        assert ask(helper, *question) == question
    with pytest.raises(TypeError, match="not JSON serializable"):
        packed([object()])


@pytest.mark.parametrize(
    ("question", "match"),
    [
        (["hold", 0], r"takes more than 0\.2 s"),
        (["signal", "SIGSEGV"], r"ends the process that runs it \(SIGSEGV\)"),
        (["end", 3], r"ends the process that runs it \(exit code 3\)"),
    ],
)
def test_it_ends_and_the_next_question_gets_another(question: list[Any], match: str) -> None:
    helper = new()
    first = ask(helper, "process", 0)
    with pytest.raises(HelperEnded, match=match):
        ask(helper, *question, cpu_s=0.2)
    assert ask(helper, "process", 0) != first
    assert not psutil.pid_exists(first)


def test_a_stopped_one_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = new()
    first = ask(helper, "process", 0)
    monkeypatch.setattr("minisgl.utils.helper._BUSY_S", 0.2)
    monkeypatch.setattr("minisgl.utils.helper._SLOWER", 0.0)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(HelperEnded, match="takes more than 9 s"):
        ask(helper, "process", 0)
    monkeypatch.undo()
    assert ask(helper, "process", 0) != first


def test_one_that_did_not_start_is_started_by_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine without memory for a process once, when a question had ended the helper."""

    def cannot_start(*args: Any, **kwargs: Any) -> None:
        raise OSError("no memory")

    helper = new()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", cannot_start)
        with pytest.raises(OSError, match="no memory"):
            ask(helper, "a")
    assert ask(helper, "a") == ["a"]


def test_threads_get_their_own_answers() -> None:
    helper, wrong = new(), list[int]()

    def run(number: int) -> None:
        wrong.extend(number for _ in range(50) if ask(helper, number) != [number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound memory")
def test_memory_has_a_bound() -> None:
    assert ask(new(), "allocate", 2**26) == "no memory"


def test_it_ends_with_the_process_that_asks() -> None:
    """Which is killed while native code runs in the helper, for minutes: no thread of it could
    look."""
    asker = subprocess.Popen(
        [sys.executable, "-c", ASKER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert asker.stdout
    process = psutil.Process(int(asker.stdout.readline()))
    while sum(process.cpu_times()[:2]) < 0.3:  # it computes; its start takes 0.1 s
        time.sleep(0.05)
    asker.kill()
    asker.wait()
    asker.stdout.close()
    process.wait(20)


def test_what_arrives_while_it_answers_does_not_end_it() -> None:
    """A question's bytes raised the signal that ends a helper. On a busy machine it came after
    they had been read: twice in 200,000 questions a good one was refused."""
    helper = new()
    ask(helper, "a")
    assert helper._socket
    sender = threading.Timer(0.2, helper._socket.send, [b"\0"])
    sender.start()
    assert ask(helper, "sleep", 0.6) == "awake"
    sender.join()


def test_a_helper_that_is_dropped_ends() -> None:
    helper = new()
    process = psutil.Process(ask(helper, "process", 0))
    del helper
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
