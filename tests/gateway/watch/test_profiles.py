"""Profiles that a rank cannot start, stop or write: the client's error, and the other traces."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from helpers.background import Background
from helpers.scripted_server import ScriptedServer
from helpers.waiting import until
from minisgl.core import Failed
from minisgl.errors import EngineError
from minisgl.message import ProfileReply
from minisgl_gateway.watch.profile import STOP_TIMEOUT_S
from minisgl_gateway.watch.profiler import StepProfiler


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(num_ranks=2) as server:
        yield server


def failed(rank: int, message: str, status: int = 500) -> ProfileReply:
    code = "profile_state" if status == 409 else "engine_error"
    reason = Failed(uid=0, message=message, code=code, status=status)
    return ProfileReply(seq=0, rank=rank, failed=reason)


def wrote(rank: int) -> ProfileReply:
    return ProfileReply(seq=0, rank=rank, trace=f"/t-rank{rank}.json", num_steps=3)


FULL = "cannot write the trace /x: No space left on device"
SILENT = "no answer from the engine within 300 s"
NONE = "no profile is running"


@pytest.mark.parametrize(
    ("action", "replies", "status", "message"),
    [
        ("stop", [wrote(0), failed(1, FULL)], 500, f"rank 1 failed: {FULL}; rank 0 wrote /t-rank0"),
        ("stop", [failed(0, FULL), wrote(1)], 500, f"rank 0 failed: {FULL}; rank 1 wrote /t-rank1"),
        ("stop", [failed(0, "a"), failed(1, "b")], 500, "rank 0 failed: a; rank 1 failed: b"),
        ("stop", [failed(0, NONE, 409), wrote(1)], 500, f"rank 0 failed: {NONE}; rank 1 wrote"),
        ("stop", [failed(0, NONE, 409), failed(1, NONE, 409)], 409, NONE),
        ("stop", [wrote(1)], 500, f"rank 0 failed: {SILENT}; rank 1 wrote /t-rank1.json"),
        ("stop", [], 500, f"rank 0 failed: {SILENT}; rank 1 failed: {SILENT}"),
        ("start", [failed(0, "c"), failed(1, "c")], 500, "rank 0 failed: c; rank 1 failed: c"),
        ("start", [ProfileReply(seq=0), failed(1, "c")], 500, "rank 1 failed: c; rank 0 is prof"),
        ("start", [ProfileReply(seq=0)], 500, f"rank 1 failed: {SILENT[:-5]}30 s; rank 0 is prof"),
    ],
)
def test_different_errors_of_ranks_are_all_reported(
    action: str,
    replies: list[ProfileReply],
    status: int,
    message: str,
    server: ScriptedServer,
    pool: Background,
) -> None:
    server.profiling = replies[::-1]  # in whatever order they come
    num_profiled = server.num_profiled
    asked = pool.submit(httpx.post, f"{server.url}/{action}_profile")
    until(lambda: server.num_profiled > num_profiled)
    httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}).raise_for_status()  # they have come
    if len(replies) < 2:
        server.pass_time(STOP_TIMEOUT_S)
    response = asked.result(60)
    error = response.json()["error"]
    assert (response.status_code, error["message"][: len(message)]) == (status, message)
    assert error["code"] == ("profile_state" if status == 409 else "engine_error")


@pytest.mark.parametrize("started", [[ProfileReply(seq=0), failed(1, "c")], [wrote(0), wrote(1)]])
def test_a_failure_names_the_requests_of_the_written_traces(
    started: list[ProfileReply], server: ScriptedServer
) -> None:
    server.profiling = started
    httpx.post(f"{server.url}/start_profile")
    for name in ("me-1", "me-2"):
        body = {"text": "a b", "max_tokens": 2}
        httpx.post(f"{server.url}/generate", json=body, headers={"X-Request-Id": name})
    server.profiling = [wrote(0), failed(1, FULL)]
    stopped = httpx.post(f"{server.url}/stop_profile")
    assert stopped.status_code == 500
    assert sorted(stopped.json()["requests"].values()) == ["me-1", "me-2"]
    server.profiling = [failed(0, NONE, 409), failed(1, NONE, 409)]
    assert list(httpx.post(f"{server.url}/stop_profile").json()) == ["error"]


def profile_once() -> StepProfiler:
    profiler = StepProfiler()
    profiler.start()
    for _ in range(100):
        torch.ones(3)
    return profiler


def test_a_trace_on_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    profiler = profile_once()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # bytes: as if the disk were full
    try:
        with pytest.raises(EngineError, match=r"cannot write .*-rank3.json: torch could not"):
            profiler.stop(tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    path, _ = profile_once().stop(tmp_path, 3)
    assert json.loads(path.read_text())["traceEvents"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_for_traces_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"cannot write the trace .*-rank0.json: Not a directory"):
        profile_once().stop(tmp_path / "file" / "traces", 0)


def test_traces_of_one_second_have_different_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20261120-212437")
    paths = [profile_once().stop(tmp_path, 1)[0] for _ in range(3)]
    ends = ["-rank1.json", "-2-rank1.json", "-3-rank1.json"]
    assert [path.name for path in paths] == [f"20261120-212437{end}" for end in ends]
    assert all(json.loads(path.read_text())["traceEvents"] for path in paths)


def test_a_profiler_that_cannot_start_is_an_error_and_can_start_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    profiler = StepProfiler()
    with monkeypatch.context() as broken:
        broken.setattr("torch.profiler.profile.start", refuse)
        with pytest.raises(EngineError, match="cannot start torch's profiler: CUPTI_ERROR"):
            profiler.start()
    profiler.start()
    profiler.stop(tmp_path, 0)
