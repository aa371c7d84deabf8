from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import openai
import pytest

from helpers import stub as stub_module
from helpers.stub import Script, StubServer
from helpers.virtual_time import VirtualLoop, run_virtually
from minisgl.benchmark import client as client_module
from minisgl.benchmark.client import SseReader, Target
from minisgl.benchmark.record import Record
from minisgl.errors import ConfigError
from minisgl_bench import sessions as sessions_module
from minisgl_bench import workload
from minisgl_bench.sessions import Client, Session
from minisgl_bench.shards import run_sharded
from minisgl_bench.summary import token_times

EVENTS = b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\ndata: 1\ndata: 2\nid: 3\n\ndata:[DONE]\n\n'
DATA = [b'{"a": 1}', b"1\n2", b"[DONE]"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_events_are_found_wherever_the_bytes_are_cut(newline: bytes) -> None:
    stream = EVENTS.replace(b"\n", newline)
    for cut in range(len(stream)):
        reader = SseReader()
        found = reader.feed(stream[:cut]) + reader.feed(stream[cut:])
        assert found + reader.feed(b"\n") == DATA, cut  # the last byte may be half a line end
    reader = SseReader()
    one_by_one = [event for i in range(len(stream)) for event in reader.feed(stream[i : i + 1])]
    assert one_by_one + reader.feed(b"\n") == DATA


def ask(
    script: Script, sessions: list[Session], *, concurrency: int | None = 4, **target: Any
) -> tuple[list[Record], StubServer]:
    """The client's records and the stub with the truth; both count from 0 on a virtual clock."""

    async def main() -> tuple[list[Record], StubServer]:
        async with StubServer(script) as stub:
            client = Client(Target(url=stub.url, **target), 0.0, lambda requests, tokens: None)
            return await client.run(list(enumerate(sessions)), concurrency), stub

    loop = VirtualLoop()
    with pytest.MonkeyPatch.context() as patch:
        for module in (client_module, sessions_module, stub_module):
            patch.setattr(module, "time", loop)
        return run_virtually(loop, main())


def requests(count: int, num_output: int) -> list[Session]:
    return workload.random_requests(count, (4, 4), (num_output, num_output), 200, seed=0).sessions


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
def test_times_agree_with_what_the_server_really_sent(
    api: Literal["completions", "chat", "generate"],
) -> None:
    script = Script(ttft_s=0.03, itl_s=0.005, stall_every=7, stall_s=0.04)
    records, stub = ask(script, requests(2, 20), api=api, model="stub", concurrency=2)
    assert len(records) == 2
    for record in records:
        assert record.error is None
        sent = stub.sent[f"bench-{record.session}-0"]
        times, how = token_times(record)
        assert how == "usage"
        assert len(times) == 20
        assert record.num_prompt is not None
        assert record.sent == pytest.approx(sent.arrived, abs=1e-6)
        assert times == pytest.approx(sent.chunks, abs=1e-6)
        assert np.diff([sent.arrived, *times]) == pytest.approx(script.gaps(20), abs=1e-6)


def test_tokens_that_come_together_are_counted_by_ids_and_by_usage() -> None:
    for token_ids, expected in ((True, "ids"), (False, "usage")):
        script = Script(itl_s=0.002, tokens_per_chunk=4, token_ids=token_ids)
        (record,), _ = ask(script, requests(1, 10))
        times, how = token_times(record)
        assert how == expected
        assert len(times) == 10
        gaps = np.diff(times)
        assert (gaps > 0).sum() == 2  # 4 + 4 + 2 tokens
        assert (gaps == 0).sum() == 7


def test_a_stream_without_usage_counts_chunks() -> None:
    (record,), _ = ask(Script(usage=False), requests(1, 5))
    assert token_times(record)[1] == "chunks"
    assert record.num_output is None


def test_failures_are_records_with_a_reason() -> None:
    records, _ = ask(Script(fail_every=3), requests(9, 2))
    errors = [record.error for record in records if record.error]
    assert len(errors) == 3
    assert all("HTTP 500" in error and "scripted failure" in error for error in errors)
    target = Target(url="http://127.0.0.1:9")  # discard: no program listens
    refused = asyncio.run(
        Client(target, time.perf_counter(), lambda *_: None).run([(0, requests(1, 1)[0])], 1)
    )
    assert "ClientConnector" in str(refused[0].error)


def test_an_open_loop_sends_at_its_times_and_a_closed_one_holds_its_number() -> None:
    work = workload.Workload(sessions=requests(5, 3)).arriving([0.0, 0.02, 0.04, 0.2, 0.2])
    records, _ = ask(Script(ttft_s=0.1), work.sessions, concurrency=None)
    by_session = sorted(records, key=lambda record: record.session)
    assert all(record.due is not None and record.sent >= record.due for record in by_session)
    assert by_session[2].sent < by_session[0].ended  # it did not wait for the first
    records, stub = ask(Script(ttft_s=0.01, itl_s=0.002), requests(20, 3), concurrency=3)
    for record in records:
        others = sum(other.sent <= record.sent < other.ended for other in records)
        assert others <= 3
    assert stub.num_connections <= 3  # connections are kept


def test_a_conversation_sends_what_was_said_before() -> None:
    talk = workload.multi_turn(1, 3, (4, 4), (2, 2), 0.0, 200, seed=0).sessions
    _, stub = ask(Script(), talk, api="chat")
    roles = [[message["role"] for message in body["messages"]] for body in stub.bodies]
    assert [len(found) for found in roles] == [1, 3, 5]
    assert roles[2] == ["user", "assistant", "user", "assistant", "user"]
    assert stub.bodies[1]["messages"][1]["content"] == " tok tok"
    _, stub = ask(Script(token_ids=True), talk, api="generate")
    ids = [body["input_ids"] for body in stub.bodies]
    assert [len(found) for found in ids] == [4, 10, 16]
    assert ids[2][:10] == ids[1]
    assert ids[1][4:6] == [7, 7]  # the answer's own ids
    _, stub = ask(Script(), talk, text=True)
    assert stub.bodies[1]["prompt"].startswith(stub.bodies[0]["prompt"])


def test_processes_share_the_work(start_stub: Callable[[Script], StubServer]) -> None:
    stub = start_stub(Script(ttft_s=0.002))
    seen: list[int] = []
    records, cpu_s = run_sharded(
        Target(url=stub.url),
        requests(30, 4),
        concurrency=5,
        processes=2,
        on_progress=lambda count, tokens: seen.append(count),
    )
    assert sorted(record.session for record in records) == list(range(30))
    assert [record.sent for record in records] == sorted(record.sent for record in records)
    assert len(cpu_s) == 2
    assert sum(seen) == 30
    assert min(record.sent for record in records) >= 0


def test_conversations_of_ids_need_the_answers_ids() -> None:
    talk = workload.multi_turn(1, 2, (4, 4), (2, 2), 0.0, 200, seed=0).sessions
    with pytest.raises(ConfigError, match="--api generate"):
        run_sharded(Target(url="http://127.0.0.1:9"), talk, concurrency=1, processes=1)


def test_the_stub_speaks_as_the_official_client_expects(
    start_stub: Callable[[Script], StubServer],
) -> None:
    stub = start_stub(Script(tokens_per_chunk=2))
    with openai.OpenAI(base_url=f"{stub.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["stub"]
        chunks = list(
            client.chat.completions.create(
                model="stub",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == " tok" * 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_the_client_and_perf_need_no_package_but_the_core() -> None:
    code = """
import sys
from minisgl import plugins
sys.modules.update({name: None for name in plugins.OURS if name != "minisgl"})
import minisgl.benchmark.client, minisgl.benchmark.perf
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
