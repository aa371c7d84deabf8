"""`timeline`: a trace of a file of `--log-steps`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from minisgl.core import SamplingParams
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.loop import PARTS
from minisgl.scheduler.meter import LoopMeter
from minisgl_bench.fakes import InstantExecutor, ListInbox, ListOutbox
from minisgl_bench.studies import timeline
from minisgl_gateway.watch.line_file import StepLog
from minisgl_gateway.watch.steps import StepRecord


def test_the_steps_of_a_real_loop_become_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    config = SchedulerConfig(
        num_pages=20, page_size=4, max_seq_len=40, vocab_size=50, eos_ids=frozenset(),
        max_prefill_tokens=16, max_running=3,
    )  # fmt: skip
    loop = Scheduler(config)
    message = UserMsg(
        uid=0, ids=ids_to_bytes([4] * 9), sampling=SamplingParams(max_tokens=20, ignore_eos=True)
    )
    inbox = ListInbox([[message]], more=lambda: [] if loop.runnable else None)
    meter = LoopMeter()
    meter.watchers.append(log)
    run(loop, InstantExecutor(), inbox, ListOutbox(), meter=meter)
    log.close()
    assert timeline.main([str(path), "--out", str(tmp_path / "out")]) == 0

    records = timeline.read_steps(path)
    assert len(records) >= 20
    events = json.loads((tmp_path / "out/steps.trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(records) * (len(PARTS) + 1)
    counted = [event["args"] for event in events if event["name"] == "tokens"]
    assert counted[0] == {"decodes": 0, "prompt": 9}
    assert counted[-1] == {"decodes": 1, "prompt": 0}
    host = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in complete
        if event["tid"] == timeline.HOST
    )
    overlaps = [min(before[1], after[1]) - after[0] for before, after in itertools.pairwise(host)]
    assert max(overlaps) < 2, "the host does one thing at a time"  # us; times are rounded


def test_a_step_file_that_is_none_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    for content, message in (("", "holds no step"), ("{}\n1\n", "steps.jsonl:1 is no step")):
        path.write_text(content)
        assert timeline.main([str(path)]) == 2
        told = "".join(capsys.readouterr().err.split())  # where it wraps depends on the path
        assert message.replace(" ", "") in told
    record = dict.fromkeys(StepRecord.__struct_fields__, 1)
    path.write_text(json.dumps(record) + '\n{"step":2,"sta')  # killed in the middle of a line
    assert len(timeline.read_steps(path)) == 1


def test_a_step_file_of_another_version_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    record = dict.fromkeys(StepRecord.__struct_fields__, 1)
    older = {name: 1 for name in record if not name.endswith("_pages")}
    path.write_text(f"{json.dumps(record | {'newer': 1})}\n{json.dumps(older)}\n")
    assert timeline.main([str(path)]) == 2
    told = "".join(capsys.readouterr().err.split())  # where it wraps depends on the path
    message = (
        "steps.jsonl:2 lacks these fields: used_pages, cached_pages, num_pages. Another version "
        "of minisgl wrote this log; record it anew, with --log-steps of this one"
    )
    assert told.endswith(message.replace(" ", ""))
