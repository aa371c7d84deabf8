"""A real server whose processes are stopped and continued."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from helpers.endless import endless_answer, endless_flags
from helpers.running_server import RunningServer, assert_nothing_left

TIMEOUT_S = 4.0  # a busy machine may keep a process waiting for three


def test_a_stopped_tokenizer_ends_the_server(endless: Path, launch: Any) -> None:
    """It is not on the way of a running stream: the next request waits for it."""
    server = launch(*endless_flags(endless), "--hang-timeout", str(TIMEOUT_S))
    with server.client() as client:
        family = server.family()
        assert server.url
        os.kill(server.pid("tokenizer-0"), signal.SIGSTOP)
        with pytest.raises(openai.APIError, match="the tokenizer-0 process has given no sign"):
            list(endless_answer(client))
    check_end(server, "tokenizer-0", family)


@pytest.mark.needs("minisgl_gateway")
def test_workers_that_are_continued_in_time_go_on_and_one_that_is_not_ends_the_server(
    endless: Path, launch: Any
) -> None:
    """With two ranks there is every kind of worker. A request that waits too long for the only
    place is refused, before and after, as the way of an answer through all of them."""
    flags = ("--max-running-requests", "1", "--max-queue-wait", "0.5", "--tp", "2")
    server = launch(*endless_flags(endless), *flags, "--hang-timeout", "6")
    with server.client() as client:
        answer = endless_answer(client)
        family = server.family()
        check_queue_wait(client)
        for worker in family[1:]:
            os.kill(worker.pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(worker.pid, signal.SIGCONT)
        # All of it, as by a laptop's sleep: for longer than the timeout.
        os.killpg(server.process.pid, signal.SIGSTOP)
        time.sleep(8.0)
        os.killpg(server.process.pid, signal.SIGCONT)
        time.sleep(1.0)
        next(iter(answer))
        check_queue_wait(client)
        assert server.process.poll() is None
        os.kill(server.pid("engine-1"), signal.SIGSTOP)
        with pytest.raises(openai.APIError, match="the engine-1 process has given no sign"):
            list(answer)
    check_end(server, "engine-1", family)


def check_queue_wait(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="--max-queue-wait") as late:
        client.completions.create(model="endless", prompt="b", max_tokens=1)
    assert late.value.status_code == 503
    assert late.value.response.headers["retry-after"] == "1"


def check_end(server: RunningServer, worker: str, family: list[psutil.Process]) -> None:
    assert server.ended() == 1
    assert f"the {worker} process has given no sign of life" in server.output["err"]
    assert_nothing_left(server, family)
