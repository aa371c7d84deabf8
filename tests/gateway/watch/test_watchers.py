"""`Watchers`: the engine is asked for frames only while an X-ray is open."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_gateway.watch import xray_route as module
from minisgl_gateway.watch.xray_route import LEASE_S, Watchers


def test_frames_are_asked_for_until_the_last_watcher_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.01)
    asked: list[Any] = []

    async def watch() -> None:
        frontend: Any = SimpleNamespace(
            failure=None, round_trips=SimpleNamespace(tell=asked.append)
        )
        watchers = Watchers(frontend)

        async def see(count: int) -> None:
            async with aclosing(watchers.watch()) as frames:
                first = asyncio.ensure_future(anext(frames))
                while len(asked) < count:
                    await asyncio.sleep(0.001)
                watchers.deliver(b"frame")
                assert await first == b"frame"

        for count in (3, 6):  # a watcher after the last one is served, too
            await see(count)
            num_asked = len(asked)
            await asyncio.sleep(0.1)
            assert len(asked) == num_asked

    asyncio.run(asyncio.wait_for(watch(), 60))
    assert {message.seconds for message in asked} == {LEASE_S}
