"""What an engine says of its memory, by which an upgrade chooses one engine at a time or two."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from minisgl.message import WatchMsg
from minisgl.runtime.args import RuntimeArgs
from minisgl.server.round_trip import RoundTrips
from minisgl_gateway.upgrade.memory import EngineMemory, tightest
from minisgl_gateway.upgrade.server import UpgradableServer
from minisgl_gateway.watch.observers import Watching, engine_memory

GIB = 1 << 30
NUM_PAGES = 7


def engine(device: str, free_gib: int, ratio: float) -> Any:
    """Return an engine that takes 40 GiB. On a CPU it has written less than 1 GiB of them."""
    sizes = {"weight_bytes": 8, "activation_bytes": 1, "vision_bytes": 1, "kv_bytes": 30}
    plan = {name: size * GIB for name, size in sizes.items()}
    return SimpleNamespace(
        memory=SimpleNamespace(**plan, memory_ratio=ratio),
        device=SimpleNamespace(
            torch_device=SimpleNamespace(type=device), free_bytes=lambda: free_gib * GIB
        ),
    )


@pytest.mark.parametrize(
    ("device", "free_gib", "ratio", "num_pages", "holds_two"),
    [
        ("cuda", 8, 0.9, None, False),
        ("cuda", 44, 0.9, None, False),  # the second one's cache would be smaller
        ("cuda", 45, 0.9, None, True),
        ("cuda", 41, 0.9, NUM_PAGES, True),
        ("cpu", 79, 0.5, NUM_PAGES, False),  # the first one may write 39 GiB more
        ("cpu", 81, 0.5, NUM_PAGES, True),
        ("cpu", 118, 0.5, None, False),
        ("cpu", 121, 0.5, None, True),
        ("cpu", 20, 0.5, None, False),
    ],
)
def test_two_engines_if_the_second_gets_as_much(
    device: str,
    free_gib: int,
    ratio: float,
    num_pages: int | None,
    holds_two: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = SimpleNamespace(rss=GIB // 2)
    monkeypatch.setattr("psutil.Process.memory_info", lambda self: written)
    args = RuntimeArgs(num_pages=num_pages)
    memory = engine_memory(engine(device, free_gib, ratio), args)
    assert memory.holds_two is holds_two
    assert memory.needed == 40 * GIB
    assert ("one engine at a time" in str(memory)) is not holds_two
    assert 0 <= memory.usable <= memory.free <= free_gib * GIB


@pytest.mark.parametrize(("free_gib", "holds_two"), [((60, 45), True), ((60, 44), False)])
def test_each_ranks_card_counts(free_gib: tuple[int, ...], holds_two: bool) -> None:
    def put(messages: list[WatchMsg]) -> None:
        for rank, free in enumerate(free_gib):
            its = engine("cuda", free, 0.9)
            its.comm = SimpleNamespace(rank=rank)
            watching: Any = Watching()
            watching.attach(SimpleNamespace(engine=its, args=RuntimeArgs(), send=trips.deliver))
            assert watching.handle(messages[0])

    tokenizer: Any = SimpleNamespace(put=put)
    trips = RoundTrips([tokenizer], num_ranks=len(free_gib))
    said: list[str] = []
    server: Any = SimpleNamespace(_frontend=SimpleNamespace(round_trips=trips))
    assert asyncio.run(UpgradableServer._holds_two(server, None, said.append)) is holds_two
    assert f"and {free_gib[1]}.00 GiB are free" in said[0]


def test_the_rank_that_lacks_most_counts() -> None:
    """Not the one with the least: it may need less."""
    small = EngineMemory(needed=2, free=9, usable=5)
    large = EngineMemory(needed=10, free=9, usable=9)
    assert tightest(map(msgspec.json.encode, (small, large))) == large
