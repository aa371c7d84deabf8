"""A real server with `--restart`, whose workers are killed and stopped."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from helpers.endless import endless_answer, endless_flags
from helpers.running_server import assert_nothing_left
from helpers.waiting import until


def test_the_engine_starts_again_behind_the_same_port(endless: Path, launch: Any) -> None:
    """After a worker hangs. It has restarted once when the engine is killed, so the server ends."""
    flags = ("--restart", "--max-restarts", "1", "--no-resume", "--hang-timeout", "4")
    server = launch(*endless_flags(endless), *flags)
    says = "the detokenizer process has given no sign"
    with server.client() as client, httpx.Client(base_url=server.url, timeout=150) as http:
        answer = endless_answer(client)
        running = 'minisgl_requests_running{rank="0"} 1.0'
        until(lambda: running in http.get("/metrics").text)
        os.kill(server.pid("detokenizer"), signal.SIGSTOP)
        with pytest.raises(openai.APIError, match=says):
            list(answer)
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "restarting"
        assert says in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json()["error"]["code"] == "restarting"
        assert running not in http.get("/metrics").text, "it is the dead engine's"
        server.wait_for("(started again)", "err")
        assert http.get("/ready").json() == {"status": "ready"}
        whole = client.completions.create(
            model="endless", prompt="a", max_tokens=3, extra_body={"ignore_eos": True}
        )
        assert whole.usage
        assert whole.usage.completion_tokens == 3
        page = http.get("/metrics").text
        assert "minisgl_restarts_total 1.0" in page
        assert "minisgl_requests_open 0.0" in page
        family = server.family()
        answer = endless_answer(client)
        pids = re.findall(r"the engine is ready .* \(pid (\d+)\)", server.output["err"])
        os.kill(int(pids[-1]), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine process was killed by signal 9"):
            list(answer)
    assert server.ended() == 1
    assert "there were 1 restarts within an hour already" in server.output["err"]
    assert_nothing_left(server, family)
