"""`--log-steps`: the steps of a real loop."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec

from minisgl.core import SamplingParams
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.loop import PARTS
from minisgl.scheduler.meter import LoopMeter
from minisgl_bench.fakes import InstantExecutor, ListInbox, ListOutbox
from minisgl_gateway.watch.line_file import LineFile, StepLog
from minisgl_gateway.watch.steps import StepRecord


def test_the_parts_of_a_real_loop_follow_each_other(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps")
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

    lines = (tmp_path / "steps").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=StepRecord) for line in lines]
    assert len(records) >= 20
    assert [(record.decodes, record.tokens) for record in records[::19]] == [(0, 9), (1, 1)]
    host = []
    for record in records:
        for start_s, parts in ((record.start_s, PARTS[:3]), (record.settle_s, PARTS[3:])):
            start_us = start_s * 1e6
            for part in parts:
                host.append((start_us, start_us + getattr(record, f"{part}_us")))
                start_us = host[-1][1]
    pairs = itertools.pairwise(sorted(host))
    overlaps = [min(before[1], after[1]) - after[0] for before, after in pairs]
    assert max(overlaps) < 2, "the host does one thing at a time"  # us; times are rounded


def test_two_engines_of_an_upgrade_write_files_of_their_own(tmp_path: Path) -> None:
    path, other = tmp_path / "steps", tmp_path / "steps.1"
    other.write_text("a file of the user")
    old = LineFile("--log-steps", path)
    old.write("first")
    old.flush()
    new = LineFile("--log-steps", path)
    new.write("new")
    new.close()
    old.write("last")
    old.close()
    assert path.read_text() == '"new"\n'
    assert (tmp_path / "steps.before").read_text() == '"first"\n"last"\n'
    assert other.exists()


def test_a_link_stays(tmp_path: Path) -> None:
    """As /dev/stdout is one, whose file the shell has opened."""
    link, path = tmp_path / "link", tmp_path / "file"
    path.touch()
    link.symlink_to(path)
    log = LineFile("--log-steps", link)
    log.write("a")
    log.close()
    assert link.is_symlink()
    assert path.read_text() == '"a"\n'
