"""`--record`: the contents of the files, their bounds, and replays of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.core import SamplingParams
from minisgl.core.adapters import Adapter
from minisgl.core.event import Finished, Token
from minisgl.core.step_times import StepTimes
from minisgl.errors import ConfigError, EngineError
from minisgl.message import AbortMsg, CompiledMsg, SchedulerMsg, StopMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.meter import LoopMeter
from minisgl_bench import replay
from minisgl_bench.fakes import FakeExecutor, ListInbox, ListOutbox
from minisgl_bench.recording import requests_of
from minisgl_bench.replay_plans import replay_plans
from minisgl_bench.workload import reusable_share
from minisgl_bench.workload import trace as read_trace
from minisgl_gateway.watch import recorder
from minisgl_gateway.watch.recorder import RecordedInbox, RecordedOutbox, Recorder
from minisgl_gateway.watch.xray import XRay

PREFIX = [40 + index % 50 for index in range(64)]


def record(
    path: Path,
    prompts: list[list[int]],
    namespaces: list[str] | None = None,
    more: Callable[[Scheduler, ListOutbox], list[SchedulerMsg] | None] | None = None,
    times: StepTimes | None = None,
    adapters: list[Adapter | None] | None = None,
    page_size: int = 16,
) -> None:
    """Serve the prompts over a fake engine, recorded.

    more: returns the messages of each later turn, None at the end. times: with a bound of 1 s.
    """
    config = SchedulerConfig(
        num_pages=256, page_size=page_size, max_seq_len=200, vocab_size=100, eos_ids=frozenset(),
        max_prefill_tokens=64, max_running=8, step_times=times, max_stall_s=times and 1.0,
        num_slots=2 if adapters else 0,
    )  # fmt: skip
    scheduler = Scheduler(config)
    keeper = Recorder(path)
    keeper.begin(config, overlap=True)
    meter = LoopMeter()
    xray = XRay(lambda frame: None, meter.epoch, keeper.frame)
    meter.watchers.append(xray)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    names = namespaces or [""] * len(prompts)
    arrivals: list[SchedulerMsg] = [
        UserMsg(uid=uid, ids=ids_to_bytes(ids), sampling=sampling, namespace=name, adapter=adapter)
        for uid, (ids, name, adapter) in enumerate(
            zip(prompts, names, adapters or [None] * len(prompts), strict=True)
        )
    ]
    kept = ListOutbox()
    rest = more or (lambda scheduler, kept: [] if scheduler.runnable else None)
    inbox = ListInbox([arrivals], more=lambda: rest(scheduler, kept))
    executor = FakeExecutor(num_pages=256, page_size=page_size, max_running=8, vocab_size=100)
    outbox = RecordedOutbox(kept, keeper)
    run(scheduler, executor, RecordedInbox(inbox, keeper), outbox, meter=meter)
    assert not keeper._open, "what has ended is forgotten"
    assert meter.watchers == [xray]
    xray._due = 0
    xray.turn_ended(scheduler)  # the last steps
    keeper.close()


def test_plans_with_adapters_are_planned_again(tmp_path: Path) -> None:
    """Slots decide which requests start, so a replay without them would plan other steps."""
    path = tmp_path / "flight"
    adapters = [Adapter(digest, "") for digest in "abc"]
    of_each = [*adapters, None, *adapters]
    names = [each.namespace("") if each else "" for each in of_each]
    record(path, [[*PREFIX, uid] for uid in range(7)], names, adapters=of_each)
    assert "15 steps of 7 requests, all as recorded" in replay_plans(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.replace('"adapter":"c"', '"adapter":null') for line in lines))
    with pytest.raises(EngineError, match="differ"):
        replay_plans(path)


def test_a_replay_sends_requests_of_the_same_lengths_and_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    record(path, [[*PREFIX, uid, uid, uid] for uid in range(6)] + [[1] * 300])
    kinds = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert {"config", "frame", "arrival", "end"} == set(kinds)
    requests = requests_of(path)
    assert [request["uid"] for request in requests] == list(range(7))
    assert [request["reason"] for request in requests] == ["length"] * 6 + ["error"]
    replay.write_trace(requests[:6], tmp_path / "trace")
    workload = read_trace(tmp_path / "trace", vocab_size=1000)
    assert [len(session.turns[0].ids) for session in workload.sessions] == [67] * 6
    assert [session.turns[0].max_tokens for session in workload.sessions] == [6] * 6
    assert reusable_share(workload.sessions) == pytest.approx(5 * 64 / (6 * 67))
    said = replay.summary(requests)
    assert "7 requests" in said
    assert "1 failed" in said
    assert "p99" in said


def test_a_recording_has_no_text_and_namespaces_share_no_digests(tmp_path: Path) -> None:
    record(tmp_path / "a", [PREFIX, PREFIX, PREFIX], ["", "", "other"])
    record(tmp_path / "b", [PREFIX])
    first, second, other = (request["hash_ids"] for request in requests_of(tmp_path / "a"))
    again = requests_of(tmp_path / "b")[0]["hash_ids"]
    assert first == second
    assert not set(first) & set(other)
    assert not set(first) & set(again), "under a key of its own"
    assert len(set(first)) == 4


def test_tokens_behind_a_stop_string_are_no_part_of_a_conversation(tmp_path: Path) -> None:
    """No later prompt has them."""
    keeper = Recorder(tmp_path / "flight")
    ids = ids_to_bytes([1] * 14)
    keeper.arrived(0, UserMsg(uid=0, ids=ids, sampling=SamplingParams()))
    for token in range(20):
        keeper.wrote(Token(uid=0, id=token))
    keeper.ended(Finished(uid=0, reason="stop", num_prompt_tokens=14, num_output_tokens=2))
    keeper.close()
    (*_, line) = (tmp_path / "flight").read_text().splitlines()
    assert len(json.loads(line)["end"]["all_hash_ids"]) == 1, "16 tokens"


def test_a_recording_keeps_the_newest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "SEGMENT_BYTES", 9000)
    path = tmp_path / "flight"
    record(path, [[*PREFIX, uid] for uid in range(60)])
    older = tmp_path / "flight.1"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["flight", "flight.1"]
    assert {file.stat().st_mode & 0o777 for file in (path, older)} == {0o600}, "others may not read"
    assert path.stat().st_size <= 9000
    assert older.stat().st_size <= 9000
    # The digests are random numbers, so the line at which a new file begins differs by run.
    lines = [*older.read_text().splitlines(), *path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    assert sum("arrival" in each for each in records) < 60, "the oldest are gone"
    assert [each["end"]["uid"] for each in records if "end" in each][-8:] == [*range(52, 60)]
    last = path.read_bytes()
    record(path, [[1, 2]])
    before = tmp_path / "flight.before"
    assert before.read_bytes() == last, "what an engine did before it died is kept"
    assert not older.exists(), "a reader takes FILE.1 for the beginning of FILE"


def test_files_that_cannot_be_written_or_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record .*nowhere/flight: No such file"):
        Recorder(tmp_path / "nowhere" / "flight")
    with pytest.raises(ConfigError, match=r"--record \.: Is a directory"):
        Recorder(Path("."))
    with pytest.raises(ConfigError, match="cannot be read"):
        requests_of(tmp_path / "none")
    other: dict[str, Any] = {"timestamp": 1}
    (tmp_path / "other").write_text(f"{json.dumps(other)}\n\n")
    with pytest.raises(ConfigError, match="line 1 is of no recording"):
        requests_of(tmp_path / "other")
    (tmp_path / "short").write_text('{"arrival": {"uid": 1}}\n{"en')
    with pytest.raises(ConfigError, match="has no request that began and ended"):
        requests_of(tmp_path / "short")


@pytest.mark.parametrize("page_size", [1, 4, 12, 24])
def test_prefixes_of_pages_are_known_that_are_no_multiple_of_16_tokens(
    page_size: int, tmp_path: Path
) -> None:
    path, prompts = tmp_path / "flight", [[*PREFIX[:-1], *[uid] * 40] for uid in range(4)]
    record(path, prompts, page_size=page_size)
    assert "of 4 requests, all as recorded" in replay_plans(path)
    replay.write_trace(requests_of(path), tmp_path / "trace")
    workload = read_trace(tmp_path / "trace", vocab_size=1000)
    assert [len(session.turns[0].ids) for session in workload.sessions] == [103] * 4
    assert reusable_share(workload.sessions) == pytest.approx(3 * 48 / (4 * 103))


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_full_disk_ends_the_recording_alone(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Short lines stay in the file's buffer until it is flushed."""
    keeper = Recorder(Path("/dev/full"))
    keeper.frame(b"{}" * size)
    keeper.frame(b"{}" * size)
    keeper.close()
    assert caplog.text.count("--record ends: /dev/full: No space left") == 1


def test_a_disk_that_is_full_at_the_end_causes_a_warning_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = Recorder(Path("/dev/full"))
    keeper.compiled(0, CompiledMsg(uid=1))
    keeper.close()
    assert "--record ends: /dev/full: No space left" in caplog.text


def later_turns() -> Callable[[Scheduler, ListOutbox], list[SchedulerMsg] | None]:
    """A client leaves, a stop string is found, and a chat goes on with its first answer."""
    turn = 0

    def more(scheduler: Scheduler, kept: ListOutbox) -> list[SchedulerMsg] | None:
        nonlocal turn
        turn += 1
        if turn == 3:
            return [AbortMsg(uid=1)]
        if turn == 6:
            return [StopMsg(uid=2, num_tokens=2)]
        if turn == 30:  # the first requests have ended
            assert not scheduler.runnable
            output = [
                event.id for event in kept.events if isinstance(event, Token) and event.uid == 3
            ]
            ids = [*PREFIX, *[3] * 11, *output, *range(20)]
            first = int(np.array(output)[-1])
            sampling = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(first,))
            return [UserMsg(uid=9, ids=ids_to_bytes(ids), sampling=sampling)]
        return [] if turn < 30 or scheduler.runnable else None

    return more


def test_the_scheduler_plans_a_recording_again(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    times = StepTimes(prompt_us=((16, 1000.0),), decode_us=500.0, row_us=100.0)
    prompts = [[*PREFIX, *[uid] * 11] for uid in range(8)]
    record(path, prompts, more=later_turns(), times=times)
    ends = [json.loads(line)["end"] for line in path.read_text().splitlines() if '{"end"' in line]
    assert {end["reason"] for end in ends} == {"length", "abort", "stop"}
    assert ends[-1]["cached_tokens"] > len(PREFIX), "a page of the first answer was found"
    said = replay_plans(path)
    assert "of 9 requests, all as recorded" in said
    assert "more" not in said
    text = path.read_text()
    assert '"max_prefill_tokens":64' in text
    path.write_text(text.replace('"max_prefill_tokens":64', '"max_prefill_tokens":48'))
    with pytest.raises(
        EngineError, match=r"step 0 differs after 0 equal steps: recorded 0 decodes, 64"
    ):
        replay_plans(path)
    path.write_text("".join(line for line in text.splitlines(True) if '{"config"' not in line))
    with pytest.raises(ConfigError, match="has no start: its ring has overwritten it"):
        replay_plans(path)
    with pytest.raises(SystemExit):
        replay.main([str(path), "--plans", "--url", "x"])


def rarer_messages(scheduler: Scheduler, kept: ListOutbox) -> list[SchedulerMsg] | None:
    """A grammar is compiled later, an answer goes on, an id is not of the vocabulary, and a stop
    string is found after a token has ended the request."""
    ended = {event.uid: event for event in kept.events if isinstance(event, Finished)}
    if 10 not in scheduler.requests.by_uid and 10 not in ended:
        ids = ids_to_bytes([*PREFIX, *range(20)])
        stops = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=tuple(range(90)))
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        return [
            UserMsg(uid=10, ids=ids, sampling=stops),
            UserMsg(uid=11, ids=ids, sampling=sampling, grammar="{}"),
            UserMsg(uid=12, ids=ids, sampling=sampling, output=ids_to_bytes([*range(9)])),
            UserMsg(uid=13, ids=ids_to_bytes([100]), sampling=sampling),
        ]
    if 10 in ended and 11 in scheduler.requests.compiling:
        assert ended[10].reason == "stop"
        return [CompiledMsg(uid=11)]
    if sum(isinstance(event, Token) and event.uid == 11 for event in kept.events) == 3:
        return [StopMsg(uid=10, num_tokens=1)]
    return [] if scheduler.runnable else None


def test_rarer_messages_are_planned_again(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    record(path, [[*PREFIX, uid] for uid in range(3)], more=rarer_messages)
    assert '"is_refused":true' in path.read_text()
    said = replay_plans(path)
    assert "of 7 requests, all as recorded" in said
    assert "more" not in said


def test_the_replay_finds_a_plan_that_reads_wrong_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "flight"
    record(path, [[*PREFIX, uid] for uid in range(3)])
    store = FakeExecutor._write

    def wrong(self: FakeExecutor, plan: Any, ids_of_rows: Any) -> None:
        store(self, plan, [ids[::-1] for ids in ids_of_rows])

    monkeypatch.setattr(FakeExecutor, "_write", wrong)
    with pytest.raises(EngineError, match="the KV cache of request 0 holds other tokens"):
        replay_plans(path)
