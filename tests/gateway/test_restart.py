"""A real server with `--restart`, whose workers are killed and stopped."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from helpers.endless import endless_answer, endless_flags
from helpers.running_server import POOL, RunningServer, assert_nothing_left
from minisgl.builtin import model_path


def last_pid(server: RunningServer, worker: str) -> int:
    return int(re.findall(rf"the {worker} is ready .* \(pid (\d+)\)", server.output["err"])[-1])


def test_the_engine_starts_again_behind_the_same_port(endless: Path, launch: Any) -> None:
    flags = ("--restart", "--max-restarts", "2", "--no-resume", "--hang-timeout", "4")
    server = launch(*endless_flags(endless), *flags)
    with server.client() as client, httpx.Client(base_url=server.url, timeout=150) as http:
        for number, (worker, sent, says) in enumerate(
            [
                ("engine", signal.SIGKILL, "the engine process was killed by signal 9"),
                ("detokenizer", signal.SIGSTOP, "the detokenizer process has given no sign"),
            ],
            start=1,
        ):
            answer = endless_answer(client)
            os.kill(last_pid(server, worker), sent)
            with pytest.raises(openai.APIError, match=says):
                list(answer)
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "restarting"
            assert says in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert http.get("/health").json() == {"status": "ok"}
            assert http.get("/ready").json()["error"]["code"] == "restarting"
            server.wait_for(f"(?:started again[^$]*){{{number}}}()", "err")
            assert http.get("/ready").json() == {"status": "ready"}
            whole = client.completions.create(
                model="endless",
                prompt="a",
                max_tokens=3,
                extra_body={"ignore_eos": True},
            )
            assert whole.usage
            assert whole.usage.completion_tokens == 3
            page = http.get("/metrics").text
            assert f"minisgl_restarts_total {number}.0" in page
            assert "minisgl_requests_open 0.0" in page
        family = server.family()
        os.kill(last_pid(server, "engine"), signal.SIGKILL)
    assert server.ended() == 1
    assert "there were 2 restarts within an hour already" in server.output["err"]
    assert_nothing_left(server, family)


def test_a_failed_restart_ends_the_server(launch: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    server = launch(*POOL, "--restart", "--model", str(folder))
    assert server.url
    (folder / "model.safetensors").write_bytes(b"")
    os.kill(server.pid("engine"), signal.SIGKILL)
    assert server.ended(150) == 1
    assert "it did not start again: " in server.output["err"]
    assert "model.safetensors is damaged or incomplete" in server.output["err"]
    assert list(server.sockets.iterdir()) == []
