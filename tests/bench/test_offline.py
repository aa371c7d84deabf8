"""`minisgl bench offline` on a tiny shape and a CPU: its rows, and the greedy check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.llm.llm import LLM
from minisgl.llm.output import RequestOutput
from minisgl_bench import offline
from minisgl_bench.floor import H200_MEMORY
from minisgl_bench.lengths import Workload, workloads
from minisgl_bench.shapes import SHAPES, shape_of

TINY = ["--shape", "tiny", "--repeats", "1", "--scale", "0.02"]
WORKLOADS = ("throughput", "single", "prefill", "shared")


def test_it_answers_the_workloads(tmp_path: Path) -> None:
    path = tmp_path / "offline.json"
    assert offline.main([*TINY, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["greedy"] == {"prompts": 4, "tokens": 64, "repeats_equal": True}
    rows = result["rows"]
    assert [(row["workload"], row["door"]) for row in rows] == [
        (work, "LLM.generate") for work in WORKLOADS
    ]
    assert (result["shape"], result["gpus"], result["scale"]) == ("tiny", 0, 0.02)
    for row in rows:
        # Seconds are rounded to 0.1 ms, which is much of a run of some milliseconds.
        rounding = 0.00005 / row["first_run_s"] + 0.00005 / row["seconds"]
        assert row["first_over_later"] == pytest.approx(
            row["first_run_s"] / row["seconds"], rel=0.002 + 1.1 * rounding
        )
        assert row["cpu_s"] > 0
        assert "floor_s" not in row, "the floor is an H200's"


def test_a_row_says_how_many_requests_fit_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline.Bench, "seconds", lambda *_: (100.0, 1.0))
    monkeypatch.setattr(offline, "card_memory", lambda: int(H200_MEMORY))
    bench = object.__new__(offline.Bench)
    many, one = workloads("throughput,single")
    shape = shape_of(SHAPES["gemma-4-31b"])
    row = offline._measure(bench, many, 1, shape)
    assert (row["floor_s"], row["of_floor"], row["rows_at_once"]) == (56.0747, 0.561, 118)
    assert "floor 56.075 s, 0.56 of it, 118 requests fit at once" in capsys.readouterr().out
    assert "rows_at_once" not in offline._measure(bench, one, 1, shape)
    assert "fit at once" not in capsys.readouterr().out


def test_different_greedy_ids_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LLM.generate

    def wrong(llm: LLM, *args: Any, cache_salt: str = "") -> list[RequestOutput]:
        outputs = honest(llm, *args, cache_salt=cache_salt)
        if cache_salt == "second":
            outputs[-1].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(LLM, "generate", wrong)
    path = tmp_path / "offline.json"
    assert offline.main([*TINY, "--workloads", "single", "--json", str(path)]) == 1
    greedy = json.loads(path.read_text())["greedy"]
    assert greedy["repeats_equal"] is False


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    (work,) = workloads("shared")
    small = work.scaled(1 / 64)
    assert (small.shared, small.requests[0], small.tokens) == (64, (65, 1), 128 * 65)
    first, again, other = (small.prompts(4096, seed) for seed in (1, 1, 2))
    assert first == again
    assert {tuple(ids[:64]) for ids in first} == {tuple(first[0][:64])}
    assert len({ids[64] for ids in first}) > 100
    assert first[0][:16] != other[0][:16], "a page of another run's would be found in the cache"
    assert all(0 <= token < 4096 for ids in first for token in ids)


def test_a_scaled_workload_keeps_at_least_one_token() -> None:
    work = Workload(name="w", requests=((3, 1), (100, 10)), temperature=0.0, shared=2)
    assert work.scaled(0.01).requests == ((1, 1), (1, 1))
    assert work.scaled(0.01).shared == 0
    assert work.tokens == 11
