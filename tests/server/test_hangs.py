"""A real server whose processes are stopped and continued."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.endless import endless_answer, endless_flags
from helpers.running_server import assert_nothing_left

TIMEOUT_S = 4.0  # a busy machine may keep a process waiting for three


@pytest.mark.parametrize(
    ("worker", "flags"),
    [("engine", ()), ("tokenizer-0", ()), ("engine-1", ("--tp", "2"))],
)
def test_a_stopped_worker_ends_the_server(
    worker: str, flags: tuple[str, ...], endless: Path, launch: Any
) -> None:
    server = launch(*endless_flags(endless), *flags, "--hang-timeout", str(TIMEOUT_S))
    with server.client() as client:
        family = server.family()
        answer = endless_answer(client)
        os.kill(server.pid(worker), signal.SIGSTOP)
        # A tokenizer is not on the way of a running stream: the next request waits for it.
        if worker == "tokenizer-0":
            answer.close()
        with pytest.raises(openai.APIError, match=f"the {worker} process has given no sign"):
            list(endless_answer(client) if worker == "tokenizer-0" else answer)
    assert server.ended() == 1
    assert f"the {worker} process has given no sign of life" in server.output["err"]
    assert_nothing_left(server, family)


def test_workers_that_are_continued_in_time_go_on(endless: Path, launch: Any) -> None:
    """With two ranks there is every kind of worker."""
    server = launch(*endless_flags(endless), "--tp", "2", "--hang-timeout", "6")
    with server.client() as client:
        answer = endless_answer(client)
        for worker in server.family()[1:]:
            os.kill(worker.pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(worker.pid, signal.SIGCONT)
        # All of it, as by a laptop's sleep: for longer than the timeout.
        os.killpg(server.process.pid, signal.SIGSTOP)
        time.sleep(8.0)
        os.killpg(server.process.pid, signal.SIGCONT)
        time.sleep(1.0)
        next(iter(answer))
        answer.close()
        endless_answer(client).close()
    assert server.process.poll() is None
    server.close()
    assert server.ended() == 0
