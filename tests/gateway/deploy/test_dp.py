"""`minisgl serve --dp 2`: two servers on this machine behind a router."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import psutil
import pytest

from minisgl.core import SamplingParams
from minisgl.engine.cpu import CpuDevice
from minisgl.errors import ConfigError, StartupFailed
from minisgl.server.flags import parse_args
from minisgl.server.model import ServedModel
from minisgl.utils import container
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.deploy import local
from minisgl_gateway.deploy.local import _devices, with_share_of_memory

KEY = "a-key"


def test_a_server_that_dies_is_replaced_and_no_request_fails(launch: Any) -> None:
    server = launch(
        "--dp", "2", "--num-pages", "512", "--served-model-name", "m", "--api-key", KEY
    )  # fmt: skip
    url = server.wait_for(r"Routing (http://\S+) to 2 servers, of which 2 are up")
    children = psutil.Process(server.process.pid).children()
    supervisors = [child for child in children if child.children()]  # not the resource tracker
    assert len(supervisors) == 2
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"Origin": "http://a.example"}).status_code == 403
    assert httpx.get(f"{url}/v1/models", headers={"Host": "a.example"}).status_code == 401
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)
    chat = [{"role": "user", "content": "What is a radix cache?"}]

    def answer() -> str:
        stream = client.chat.completions.create(
            model="m", messages=chat, stream=True, max_tokens=8, temperature=0
        )
        return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)

    first = answer()
    assert first
    supervisors[0].send_signal(signal.SIGKILL)
    for _ in range(4):
        assert answer() == first
    server.wait_for(rf"replica \d \(pid ({supervisors[0].pid})\) has ended; starting", "err")
    deadline = time.monotonic() + 90
    while httpx.get(f"{url}/health").json() != {"status": "ok", "replicas": 2, "up": 2}:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)
    family = server.family()
    server.process.send_signal(signal.SIGTERM)
    assert server.ended(30) == 0
    _, alive = psutil.wait_procs(family, 5)
    assert not alive, "no process is left"


def test_a_missing_model_ends_the_command(launch: Any, tmp_path: Path) -> None:
    server = launch("--dp", "2", "--model", str(tmp_path / "none"))
    assert server.ended(60) == 1
    assert "none" in server.output["err"]


PARENT = """
import signal
from minisgl_gateway.deploy.child import ServerProcess
from minisgl_gateway.args import GatewayArgs
if __name__ == "__main__":
    server = ServerProcess("a server", GatewayArgs(host="127.0.0.1", port=0, num_pages=64))
    print(server.wait_ready(), flush=True)
    signal.pause()
"""


def test_a_server_ends_with_its_killed_parent(tmp_path: Path, sockets: Path) -> None:
    """No process is left but the parent's script."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = {**os.environ, "TMPDIR": str(sockets), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout
        url = parent.stdout.readline().strip()
        assert httpx.get(f"{url}/health", timeout=60).is_success
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
        assert parent.wait(60) == -signal.SIGKILL
        _, alive = psutil.wait_procs(family, 30)
        for process in alive:
            process.kill()
    assert not alive
    assert [*sockets.iterdir()] == []


@pytest.mark.parametrize("other", ["--nnodes 2", "--shell", "--dry-run", "--record f"])
def test_options_of_a_single_server_are_refused(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--dp", "2", *other.split()])
    assert "--dp 2 does not go with" in capsys.readouterr().err


def test_the_servers_serve_a_downloaded_model_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ServedModel(
        folder=Path("/hub/snapshots/0f1e"), names=("a/b",), defaults=SamplingParams()
    )
    started: list[GatewayArgs] = []
    monkeypatch.setattr(local, "find_model", lambda args: found)
    monkeypatch.setattr(local, "ServerProcess", lambda name, args, env: started.append(args))
    local._Servers(GatewayArgs(model="a/b", dp=2, device="cpu"))
    asked = [(args.model, args.served_model_name) for args in started]
    assert asked == [("/hub/snapshots/0f1e", "a/b")] * 2


def test_cores_are_those_of_the_process_and_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dp` divides them among its servers."""
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert local.num_cores() == 8
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert local.num_cores() == 3


def test_servers_have_threads_folders_and_keys_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, GatewayArgs, dict[str, str]]] = []
    monkeypatch.setattr(local, "ServerProcess", lambda *given: started.append(given))
    monkeypatch.setattr(local, "num_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    args = GatewayArgs(device="cpu", dp=2, api_key="a", profile_dir="p")
    servers = local._Servers(args)
    assert [variables for *_, variables in started] == [{"OMP_NUM_THREADS": "3"}] * 2
    assert [given.profile_dir for _, given, _ in started] == ["p/replica-0", "p/replica-1"]
    assert [given.api_key for _, given, _ in started] == [f"a,{servers.key}"] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # the operator's number stays
    local._Servers(args)
    assert started[-1][2] == {"OMP_NUM_THREADS": "5"}


def test_pauses_between_failed_starts_double_until_a_start_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed, no_room = StartupFailed("no memory"), OSError("no room for a process")
    starts = iter([None, None, failed, no_room, None, failed, None, no_room, *[failed] * 8])
    pauses: list[float] = []
    changes = 0

    class Ended:
        """A server that has already ended."""

        name, pid, url = "a server", 1, "http://127.0.0.1:1"

        def __init__(self, *args: Any) -> None:
            self.error = next(starts)
            if self.error is no_room:
                raise no_room
            self.sentinel, end = os.pipe()
            os.close(end)

        def __del__(self) -> None:
            if self.error is not no_room:
                os.close(self.sentinel)

        def wait_ready(self) -> None:
            if self.error:
                raise self.error

        def wait_ended(self, timeout_s: float) -> None:
            pass

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 11:
            raise asyncio.CancelledError

    async def change(urls: list[str]) -> None:
        nonlocal changes
        changes += 1

    monkeypatch.setattr(local, "ServerProcess", Ended)
    monkeypatch.setattr(local.asyncio, "sleep", sleep)
    servers = local._Servers(GatewayArgs(device="cpu", dp=1))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(servers.keep(0, cast(Any, SimpleNamespace(change=change))))
    assert pauses == [1, 2, 1, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert changes == 3


def test_servers_divide_memory_and_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert with_share_of_memory(GatewayArgs(), 4).memory_ratio == CpuDevice.default_memory_ratio / 4
    assert with_share_of_memory(GatewayArgs(memory_ratio=0.8), 2).memory_ratio == 0.4
    assert with_share_of_memory(GatewayArgs(num_pages=9), 2) == GatewayArgs(num_pages=9)
    assert _devices(GatewayArgs(device="cpu", dp=2)) == []
    args = GatewayArgs(device="cuda", dp=2, tp=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _devices(args) == ["0,1", "2,3"]
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert _devices(args) == ["4,5", "6,7"]
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(ConfigError, match="needs 4 GPUs"):
        _devices(args)
