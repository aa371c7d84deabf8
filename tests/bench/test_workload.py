from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minisgl.errors import ConfigError
from minisgl_bench import workload
from minisgl_bench.sessions import as_text
from minisgl_bench.workload import FIRST_ID


def mooncake(tmp_path: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_poisson_gaps_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = workload.poisson_times(20_000, 4.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # exponential: as large as the mean
    assert times == workload.poisson_times(20_000, 4.0, seed=1)


def test_random_requests_stay_within_both_bounds_and_reach_them() -> None:
    work = workload.random_requests(500, (3, 6), (1, 2), 200, seed=0)
    turns = [session.turns[0] for session in work.sessions]
    assert {len(turn.ids) for turn in turns} == {3, 4, 5, 6}
    assert {turn.max_tokens for turn in turns} == {1, 2}
    every = np.concatenate([turn.ids for turn in turns])
    assert every.min() >= FIRST_ID
    assert every.max() < 200


def test_a_trace_keeps_its_prefixes_when_it_is_scaled(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path,
        (1000, 1100, 64, [7, 8, 9]),
        (3000, 1536, 640, [7, 8, 10]),
        (3000, 600, 64, [11, 8]),
    )
    work = workload.trace(path, vocab_size=1000, scale=1 / 32)
    first, second, third = (session.turns[0] for session in work.sessions)
    assert [len(turn.ids) for turn in (first, second, third)] == [34, 48, 19]
    assert [turn.max_tokens for turn in (first, second, third)] == [2, 20, 2]
    assert [session.at_s for session in work.sessions] == [0.0, 2.0, 2.0]
    assert (first.ids[:32] == second.ids[:32]).all()  # two blocks of 512 / 32 tokens
    assert (first.ids[32:] != second.ids[32:34]).any()
    assert (first.ids[:16] != third.ids[:16]).any()
    assert (second.ids[16:19] == third.ids[16:]).all()  # a block has its tokens wherever it is
    assert work.notes["reusable_share"] == pytest.approx(32 / 101, abs=1e-4)
    again = workload.trace(path, vocab_size=1000, scale=1 / 32, seed=1).sessions[0].turns[0]
    assert (again.ids != first.ids).any()


def test_a_trace_is_clipped_to_the_context_and_says_so(tmp_path: Path) -> None:
    path = mooncake(tmp_path, (0, 512, 100, [1]), (0, 50, 10, [1]), (0, 90, 600, [1]))
    work = workload.trace(path, vocab_size=1000, max_len=200)
    turns = [session.turns[0] for session in work.sessions]
    assert [(len(turn.ids), turn.max_tokens) for turn in turns] == [(100, 100), (50, 10), (90, 100)]
    assert work.notes["num_clipped"] == 2


def test_the_bailian_format_has_blocks_of_16_and_seconds(tmp_path: Path) -> None:
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "type": "text", "turn": 1}
    row |= {"input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}
    path = tmp_path / "bailian.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "timestamp": 62.5}) + "\n")
    work = workload.trace(path, vocab_size=1000, speed=2.0, start=0, count=5)
    assert [session.at_s for session in work.sessions] == [0.0, 0.5]
    assert [len(session.turns[0].ids) for session in work.sessions] == [40, 40]


def test_a_broken_trace_is_reported_by_line(tmp_path: Path) -> None:
    path = mooncake(tmp_path, (0, 5, 5, [1]))
    path.write_text(path.read_text() + '{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2: expected an object"):
        workload.trace(path, vocab_size=1000)
    with pytest.raises(ConfigError, match="no requests from number 9"):
        workload.trace(path, vocab_size=1000, start=9)


def test_shared_prefixes_and_conversations() -> None:
    work = workload.shared_prefix(6, 2, 32, (4, 4), (1, 1), 1000, seed=0)
    ids = [session.turns[0].ids for session in work.sessions]
    assert all(len(prompt) == 36 for prompt in ids)
    assert (ids[0][:32] == ids[2][:32]).all()
    assert (ids[0][:32] != ids[1][:32]).any()
    assert (ids[0][32:] != ids[2][32:]).any()
    talks = workload.multi_turn(3, 4, (5, 5), (2, 2), 0.5, 1000, seed=0).sessions
    assert [len(talk.turns) for talk in talks] == [4, 4, 4]
    assert [turn.think_s for turn in talks[0].turns] == [0.0, 0.5, 0.5, 0.5]


def test_equal_ids_are_equal_text() -> None:
    a, b = np.array([100, 101, 102], np.int32), np.array([100, 101, 105], np.int32)
    assert as_text(a).split()[:2] == as_text(b).split()[:2]
    assert as_text(a) != as_text(b)
