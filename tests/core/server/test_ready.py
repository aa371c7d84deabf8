"""GET /ready and /health, and open calls, while workers are dead, silent or busy."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re

import httpx
import pytest

from helpers.api_requests import chat
from helpers.scripted_server import ScriptedServer
from minisgl.errors import EngineError
from minisgl.message import PingMsg
from minisgl.message.frontend import FrontendMsg, PongMsg, UserReply
from minisgl.server.frontend import Frontend
from minisgl.utils.zmq import AsyncPullQueue, Endpoints, PullQueue, PushQueue


def test_a_dead_worker_ends_every_open_call() -> None:
    with ScriptedServer() as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ready"}
        with http.stream(
            "POST", "/v1/chat/completions", json=chat("one !hang", stream=True)
        ) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            error = EngineError("the engine process was killed by signal 9")
            error.status = 503
            server.fail(error)
            rest = [line for line in lines if line]
            assert (
                "killed by signal 9"
                in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
            )
        for response in (
            http.get("/health"),
            http.get("/ready"),
            http.post("/v1/chat/completions", json=chat("one")),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "server_error"
            assert "killed by signal 9" in response.json()["error"]["message"]


def test_ready_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.server.api_server.READY_TIMEOUT_S", 0.2)
    with ScriptedServer() as server, httpx.Client(base_url=server.url) as http:
        server.silent.set()
        response = http.get("/ready")
        assert response.status_code == 503
        assert "no answer" in response.json()["error"]["message"]
        assert http.get("/health").status_code == 200


def test_ready_during_a_long_step_and_the_age_of_the_last_token() -> None:
    """A ping does not come back during a step, but the workers make progress."""
    stalled: list[str | None] = [None]
    server = ScriptedServer(stalled=lambda: stalled[0])
    with server, httpx.Client(base_url=server.url, timeout=60) as http:
        server.silent.set()
        assert http.get("/ready").json() == {"status": "ready"}
        with (
            concurrent.futures.ThreadPoolExecutor() as pool,
            contextlib.suppress(httpx.HTTPError),
        ):
            asked = pool.submit(http.post, "/v1/chat/completions", json=chat("one"))
            while "oldest_token_age_s" not in (answer := http.get("/ready").json()):
                pass
            again = http.get("/ready").json()
            assert again["oldest_token_age_s"] >= answer["oldest_token_age_s"] + 0.5
            page = http.get("/metrics").text
            [age] = re.findall(r"^minisgl_oldest_token_age_seconds (\S+)$", page, re.MULTILINE)
            assert float(age) > again["oldest_token_age_s"]
            stalled[0] = "the engine process makes no progress"
            refused = http.get("/ready")
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == stalled[0]
            error = EngineError("the end")
            server.fail(error)
            assert asked.result().status_code == 500


@pytest.mark.parametrize("num_awake", [1, 2])
def test_ready_asks_every_tokenizer(num_awake: int) -> None:
    endpoints = Endpoints.create()
    inboxes: list[PullQueue[FrontendMsg]] = [
        PullQueue(endpoints.tokenizer(index), FrontendMsg) for index in range(2)
    ]
    replies: AsyncPullQueue[UserReply] = AsyncPullQueue(endpoints.api, UserReply)
    to_tokenizers = [PushQueue(endpoints.tokenizer(index)) for index in range(2)]
    to_api = PushQueue(endpoints.api)

    async def ping() -> bool:
        frontend = Frontend(to_tokenizers, replies)
        dispatch = asyncio.create_task(frontend.run())
        asked = asyncio.create_task(frontend.round_trips.ping(60 if num_awake == 2 else 0.3))
        for inbox in inboxes[:num_awake]:
            for message in await asyncio.to_thread(inbox.get, 60):
                assert isinstance(message, PingMsg)
                to_api.put([PongMsg(seq=message.seq)])
        is_ready = await asked
        dispatch.cancel()
        return is_ready

    try:
        assert asyncio.run(ping()) == (num_awake == 2)
    finally:
        for queue in (*inboxes, *to_tokenizers, to_api, replies):
            queue.close()
        endpoints.remove()
