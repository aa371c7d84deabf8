"""The log names clients whose prompts reuse no prefix, once an hour."""

from __future__ import annotations

import logging

import httpx
import pytest

from helpers.running_server import RunningServer
from minisgl.core import Finished
from minisgl_gateway.watch.prefixes import AGAIN_S, IN_A_ROW, PrefixWatch

NAME = "minisgl.minisgl_gateway.watch.prefixes"


def end(differs_at: int | None, num_prompt: int = 5000) -> Finished:
    return Finished(
        uid=0,
        reason="stop",
        num_prompt_tokens=num_prompt,
        num_output_tokens=1,
        prefix_differs_at=differs_at,
    )


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    caplog.set_level(logging.WARNING, NAME)
    return caplog


def test_a_client_is_named_after_some_prompts_in_a_row(log: pytest.LogCaptureFixture) -> None:
    watch = PrefixWatch()
    for _ in range(IN_A_ROW - 1):
        watch.finished("10.0.0.7", end(12), 0.0)
        watch.finished("10.0.0.8", end(900), 0.0)  # differs late
        watch.finished("10.0.0.9", end(None), 0.0)  # goes on where another one ended
        watch.finished("10.0.0.6", end(12, num_prompt=99), 0.0)  # short
    assert not log.messages
    watch.finished("10.0.0.7", end(13), 0.0)
    (line,) = log.messages
    assert line.startswith("10.0.0.7: the last 8 prompts of 1000 tokens or more differed from all")
    assert "the last one at token 13" in line
    watch.finished("10.0.0.7", end(13), AGAIN_S - 1)
    assert len(log.messages) == 1
    watch.finished("10.0.0.7", end(13), AGAIN_S)
    assert len(log.messages) == 2


def test_a_prompt_that_differs_late_ends_the_row(log: pytest.LogCaptureFixture) -> None:
    watch = PrefixWatch()
    for differs_at in [5] * (IN_A_ROW - 1) + [700] + [5] * (IN_A_ROW - 1):
        watch.finished("a", end(differs_at), 0.0)
    assert not log.messages


def test_a_server_logs_where_prompts_differ_and_which_client_sends_them(
    builtin: RunningServer,
) -> None:
    with httpx.Client(base_url=builtin.url, timeout=60) as http:
        found = []
        for turn in range(IN_A_ROW + 1):
            ids = [300, 301, 302, 310 + turn, *([400, 401] * 600)]
            body = {"input_ids": ids, "max_tokens": 1, "cache_salt": "prefixes"}
            found.append(http.post("/generate", json=body).json()["timings"])
    assert [timings["prefix_differs_at"] for timings in found] == [None, *[3] * IN_A_ROW]
    assert {timings["num_cached_tokens"] for timings in found} == {0}
    builtin.wait_for("(127.0.0.1: the last 8 prompts .* at token 3)", "err")
