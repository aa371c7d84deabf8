"""Frames of the X-ray, made from the loop over a fake engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from helpers.books import check_books
from minisgl.core import SamplingParams
from minisgl.message import SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.meter import LoopMeter
from minisgl_bench.fakes import FakeExecutor, ListInbox, ListOutbox
from minisgl_gateway.watch import xray as module
from minisgl_gateway.watch.xray import CACHED, FIRST_UID, FREE, SHARED, Frame, XRay
from minisgl_zoo.cache_groups.groups import WindowGroup

CONFIG = SchedulerConfig(
    num_pages=64, page_size=4, max_seq_len=60, vocab_size=50, eos_ids=frozenset(),
    max_prefill_tokens=16, max_running=8,
)  # fmt: skip


def watch(
    monkeypatch: pytest.MonkeyPatch,
    *,
    every_s: float,
    watch_s: float,
    text_of: Callable[[list[int]], str] | None = None,
    at_end: bool = False,
) -> list[Frame]:
    """Run eight requests with a common prefix. Returns the frames, if wanted one of the end too."""
    monkeypatch.setattr(module, "EVERY_S", every_s)
    monkeypatch.setattr(module, "SHARE", 1e9)
    monkeypatch.setattr(module, "CACHE_SHARE", 1e9)
    frames: list[Frame] = []
    scheduler = Scheduler(CONFIG)

    def send(data: bytes) -> None:
        frames.append(msgspec.json.decode(data, type=Frame))
        check_books(scheduler)

    meter = LoopMeter()
    watcher = XRay(send, meter.epoch, text_of=text_of)
    watcher.watch(watch_s)
    meter.watchers.append(watcher)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    arrivals: list[SchedulerMsg] = [
        UserMsg(uid=uid, ids=ids_to_bytes([7] * 12 + [uid] * 5), sampling=sampling)
        for uid in range(8)
    ]
    inbox = ListInbox([arrivals], more=lambda: [] if scheduler.runnable else None)
    run(
        scheduler,
        FakeExecutor(num_pages=64, page_size=4, max_running=8, vocab_size=50),
        inbox,
        ListOutbox(),
        meter=meter,
    )
    assert (not meter.watchers) == (watch_s < 0)
    if at_end:
        watcher._due = 0
        watcher.turn_ended(scheduler)
    return frames


def test_frames_have_the_state_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = watch(monkeypatch, every_s=0.0, watch_s=60)
    steps = [step for frame in frames for step in frame.steps]
    assert [step[0] for step in steps] == list(range(len(steps)))
    assert sum(step[11] for step in steps) == 8 * 6
    assert {uid for step in steps for uid in (step[12] or [])[::2]} == set(range(8))
    states = {request.state for frame in frames for request in frame.requests}
    assert {"waiting", "prefill", "decode"} <= states
    assert any(SHARED in (frame.page_map or [])[::2] for frame in frames)
    for frame in frames:
        assert frame.page_map is not None
        assert frame.tree is not None
        owners: dict[int, int] = {}
        for owner, count in zip(frame.page_map[::2], frame.page_map[1::2], strict=True):
            owners[owner] = owners.get(owner, 0) + count
        assert sum(owners.values()) == frame.num_pages == 64
        assert owners.get(FREE, 0) == 64 - frame.num_used_pages - frame.num_cached_pages
        assert owners.get(CACHED, 0) == frame.num_cached_pages
        assert {owner - FIRST_UID for owner in owners if owner >= FIRST_UID} <= set(range(8))
        assert sum(pages for _, pages, _ in frame.tree) <= 64
        assert all(parent < index for index, (parent, _, _) in enumerate(frame.tree))
    assert frames[-1].num_requests == 0
    assert frames[-1].num_cached_pages > 0


def test_frames_have_the_texts_of_nodes_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def text_of(ids: list[int]) -> str:
        asked.append(ids)
        return " ".join(map(str, ids))

    frames = watch(monkeypatch, every_s=0.0, watch_s=60, text_of=text_of)
    assert all(len(frame.texts or []) == len(frame.tree or []) for frame in frames)
    roots = [
        text
        for frame in frames
        for text, (parent, pages, _) in zip(frame.texts or [], frame.tree or [], strict=True)
        if parent < 0 and pages
    ]
    assert roots
    assert all(text.startswith("7 7 7 7") for text in roots)
    assert len(asked) == len({tuple(ids) for ids in asked}), "each text is made once"


def test_a_watch_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(watch(monkeypatch, every_s=0.0, watch_s=-1)) == 0


def test_tokens_from_before_the_watch_are_not_counted() -> None:
    scheduler = Scheduler(CONFIG)
    executor = FakeExecutor(num_pages=64, page_size=4, max_running=8, vocab_size=50)
    meter = LoopMeter()
    frames: list[Frame] = []

    def ask(uid: int, num_output: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output)
        message = UserMsg(uid=uid, ids=ids_to_bytes([uid] * 5), sampling=sampling)
        inbox = ListInbox([[message]], more=lambda: [] if scheduler.runnable else None)
        run(scheduler, executor, inbox, ListOutbox(), meter=meter)

    ask(1, 20)
    watcher = XRay(
        lambda data: frames.append(msgspec.json.decode(data, type=Frame)),
        meter.epoch,
        num_output_tokens=scheduler.stats.num_output_tokens,
    )
    watcher.watch(60)
    meter.watchers.append(watcher)
    ask(2, 6)
    watcher._due = 0
    watcher.turn_ended(scheduler)
    assert sum(step[11] for frame in frames for step in frame.steps) == 6


def test_a_model_without_a_full_group_shows_free_pages_only() -> None:
    """The map of pages is that of the full group."""
    window = WindowGroup(window=8, num_pages=16)
    scheduler = Scheduler(replace(CONFIG, num_pages=0, groups=(window,)))
    executor = FakeExecutor(page_size=4, max_running=8, vocab_size=50, groups=(window,))
    message = UserMsg(uid=1, ids=ids_to_bytes([7] * 12), sampling=SamplingParams(max_tokens=3))
    inbox = ListInbox([[message]], more=lambda: [] if scheduler.runnable else None)
    run(scheduler, executor, inbox, ListOutbox())
    sent: list[bytes] = []
    watcher = XRay(sent.append, 0.0)
    watcher.watch(60)
    watcher.turn_ended(scheduler)
    frame = msgspec.json.decode(sent[0], type=Frame)
    assert frame.page_map == [FREE, 16]


def test_frames_take_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next frame is due after 500 times of what this one took, the pages after 1,000 times."""
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(module.time, clock, iter(map(float, range(10**6))).__next__)
    sent: list[bytes] = []
    watcher = XRay(sent.append, 0.0)
    watcher.watch(10**6)
    scheduler = Scheduler(CONFIG)
    for _ in range(1200):
        watcher.turn_ended(scheduler)
    frames = [msgspec.json.decode(data, type=Frame) for data in sent]
    assert [frame.tree is not None for frame in frames] == [True, False, True]


def test_a_frame_has_the_newest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STEPS", 3)
    frames = watch(monkeypatch, every_s=1e9, watch_s=60, at_end=True)
    [first, last] = frames
    assert first.steps == []
    assert len(last.steps) == 3
    assert last.steps[0][12] is not None
    assert all(step[12] is None for step in last.steps[1:]), "the same requests decode"
    assert last.num_skipped == last.steps[0][0] > 0
