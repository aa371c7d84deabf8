"""Queues: order, batching, waiting, bad frames, and that no call blocks forever."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from minisgl.errors import ConfigError
from minisgl.utils.zmq import AsyncPullQueue, Endpoints, PullQueue, PushQueue, wait


class Apple(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    number: int


class Pear(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    name: str


Fruit = Apple | Pear


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    endpoints = Endpoints.create()
    yield endpoints
    endpoints.remove()
    assert not endpoints.folder.exists()


class TestEndpoints:
    def test_private_and_distinct(self, endpoints: Endpoints) -> None:
        other = Endpoints.create()
        try:
            assert other.folder != endpoints.folder
            assert stat.S_IMODE(endpoints.folder.stat().st_mode) == 0o700
            addresses = [endpoints.tokenizer(0), endpoints.tokenizer(1), endpoints.scheduler]
            addresses += [endpoints.detokenizer, endpoints.api]
            assert len(set(addresses)) == 5
            assert all(a.startswith(f"ipc://{endpoints.folder}/") for a in addresses)
        finally:
            other.remove()
            other.remove()

    def test_a_full_disk_is_a_config_error(self, endpoints: Endpoints, monkeypatch: Any) -> None:
        def no_space(*args: Any, **options: Any) -> str:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(tempfile, "mkdtemp", no_space)
        with pytest.raises(ConfigError, match="No space left on device; make room there"):
            Endpoints.create()
        endpoints.folder.rmdir()  # a socket in it cannot be made
        with pytest.raises(ConfigError, match=r"at \S+/api: No such file .*set TMPDIR"):
            PullQueue(endpoints.api, Fruit)
        endpoints.folder.mkdir()

    def test_long_folder_is_refused(self, monkeypatch: Any, tmp_path: Path) -> None:
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(ConfigError, match="set TMPDIR"):
            Endpoints.create()
        assert list(long.iterdir()) == []


class TestQueues:
    def test_order_across_frames_and_before_bind(self, endpoints: Endpoints) -> None:
        push = PushQueue(endpoints.api)
        push.put([Apple(number=0), Pear(name="a")])
        push.put([])
        push.put([Apple(number=1)])
        pull: PullQueue[Fruit] = PullQueue(endpoints.api, Fruit)
        got: list[Fruit] = []
        while len(got) < 3:
            records = pull.get(60)
            assert records, "nothing arrived within a minute"
            got += records
        assert got == [Apple(number=0), Pear(name="a"), Apple(number=1)]
        push.close()
        pull.close()
        push.close()
        pull.close()

    def test_get_waits_no_longer_than_asked(self, endpoints: Endpoints) -> None:
        pull: PullQueue[Fruit] = PullQueue(endpoints.api, Fruit)
        start = time.perf_counter()
        assert pull.get(0) == []
        assert time.perf_counter() - start < 30
        start = time.perf_counter()
        assert pull.get(0.05) == []
        assert time.perf_counter() - start >= 0.045
        pull.close()

    def test_get_without_limit_wakes_up(self, endpoints: Endpoints) -> None:
        pull: PullQueue[Fruit] = PullQueue(endpoints.api, Fruit)
        push = PushQueue(endpoints.api)
        timer = threading.Timer(0.05, push.put, [[Apple(number=7)]])
        timer.start()
        assert pull.get(None) == [Apple(number=7)]
        timer.join()
        push.close()
        pull.close()

    def test_put_never_blocks_and_loses_nothing(self, endpoints: Endpoints) -> None:
        pull: PullQueue[Fruit] = PullQueue(endpoints.api, Fruit)
        push = PushQueue(endpoints.api)
        num = 20_000  # far above ZeroMQ's default limit of 1,000 messages a side
        for number in range(num):
            push.put([Apple(number=number)])
        got: list[Fruit] = []
        while len(got) < num:
            records = pull.get(60)
            assert records
            got += records
        assert got == [Apple(number=number) for number in range(num)]
        push.close()
        pull.close()

    def test_records_before_close_reach_the_peer(self, endpoints: Endpoints) -> None:
        pull: PullQueue[Fruit] = PullQueue(endpoints.api, Fruit)
        push = PushQueue(endpoints.api)
        push.put([Apple(number=1)])
        push.close()
        assert pull.get(60) == [Apple(number=1)]
        pull.close()

    def test_close_without_peer_is_bounded(self, endpoints: Endpoints) -> None:
        push = PushQueue(endpoints.api)
        push.put([Apple(number=1)])
        start = time.perf_counter()
        push.close()
        assert time.perf_counter() - start < 60

    def test_bad_frames_are_dropped(self, endpoints: Endpoints, caplog: Any) -> None:
        pull: PullQueue[Fruit] = PullQueue(endpoints.api, Fruit)
        context = zmq.Context()
        raw = context.socket(zmq.PUSH)
        raw.connect(endpoints.api)
        encode = msgspec.msgpack.encode
        bad = [
            b"",
            b"\xc1",
            encode({"type": "Apple", "number": 1}),  # no list
            encode([{"type": "Plum", "number": 1}]),
            encode([{"type": "Apple", "number": "1"}]),
            encode([{"type": "Apple", "number": 1, "colour": "red"}]),
        ]
        for frame in bad:
            raw.send(frame)
        raw.send(encode([Apple(number=3)]))
        got: list[Fruit] = []
        deadline = time.monotonic() + 60
        while not got and time.monotonic() < deadline:
            got += pull.get(0.1)
        assert got == [Apple(number=3)]
        assert pull.num_dropped == len(bad)
        assert len(caplog.records) == len(bad)
        assert all("\n" not in record.getMessage() for record in caplog.records)
        context.destroy(linger=0)
        pull.close()

    def test_wait_on_two(self, endpoints: Endpoints) -> None:
        one: PullQueue[Fruit] = PullQueue(endpoints.tokenizer(0), Fruit)
        two: PullQueue[Fruit] = PullQueue(endpoints.detokenizer, Fruit)
        to_one, to_two = PushQueue(endpoints.tokenizer(0)), PushQueue(endpoints.detokenizer)
        reading, writing = os.pipe()
        assert wait([one, two], 0.01, news=reading) == []
        to_two.put([Apple(number=2)])
        assert wait([one, two], 60, news=reading) == [two]
        assert two.get(0) == [Apple(number=2)]
        to_one.put([Apple(number=1)])
        to_two.put([Apple(number=2)])
        got: list[Fruit] = []
        while len(got) < 2:
            ready = wait([one, two], 60, news=reading)
            assert ready
            for queue in ready:
                got += queue.get(0)
        os.write(writing, b"x")
        assert wait([one, two], 60, news=reading) == []
        for end_of_pipe in (reading, writing):
            os.close(end_of_pipe)
        assert {fruit.number for fruit in got if isinstance(fruit, Apple)} == {1, 2}
        for end in (one, two, to_one, to_two):
            end.close()


class TestAsync:
    def test_everything_arrives_in_order(self, endpoints: Endpoints) -> None:
        num = 5_000

        def send() -> None:
            push = PushQueue(endpoints.api)
            for number in range(num):
                push.put([Apple(number=number)])
                if number % 500 == 0:
                    time.sleep(0.005)  # let the receiver run dry, so that it has to wait
            push.close()

        async def receive() -> list[Fruit]:
            pull: AsyncPullQueue[Fruit] = AsyncPullQueue(endpoints.api, Fruit)
            got: list[Fruit] = []
            while len(got) < num:
                got += await asyncio.wait_for(pull.get(), 60)
            pull.close()
            return got

        sender = threading.Thread(target=send)
        sender.start()
        got = asyncio.run(receive())
        sender.join()
        assert got == [Apple(number=number) for number in range(num)]

    def test_cancelled_wait_loses_nothing(self, endpoints: Endpoints) -> None:
        async def run() -> None:
            pull: AsyncPullQueue[Fruit] = AsyncPullQueue(endpoints.api, Fruit)
            push = PushQueue(endpoints.api)
            for number in range(5):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(pull.get(), 0.01)
                push.put([Apple(number=number)])
                assert await asyncio.wait_for(pull.get(), 60) == [Apple(number=number)]
            push.close()
            pull.close()

        asyncio.run(run())

    def test_other_tasks_run_while_the_queue_is_full(self, endpoints: Endpoints) -> None:
        async def run() -> int:
            pull: AsyncPullQueue[Fruit] = AsyncPullQueue(endpoints.api, Fruit)
            push = PushQueue(endpoints.api)
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())
            for _ in range(50):
                push.put([Apple(number=0)])
                await pull.get()
            task.cancel()
            push.close()
            pull.close()
            return turns

        assert asyncio.run(run()) >= 50
