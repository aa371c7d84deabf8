"""The fixed workloads, and commands that are asked for another."""

from __future__ import annotations

import pytest

from minisgl_bench.lengths import WORKLOADS, ordinary_ids, workloads
from minisgl_bench.run import main


def test_the_workloads_are_those_of_the_tables() -> None:
    throughput = WORKLOADS["throughput"].requests
    assert len(throughput) == 256
    assert all(100 <= length <= 1024 for request in throughput for length in request)
    # As benchmarks/results count them.
    assert [sum(tokens) for tokens in zip(*throughput, strict=True)] == [145_184, 152_466]
    assert WORKLOADS["mixed"].requests.count((6000, 64)) == 8
    assert workloads("batch3")[0].requests == ((128, 256),) * 3


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("offline", "nope"), ("offline", "")),
        *(("serving", name) for name in ("nope", "", "batch", "batch0", "8")),
    ],
)
def test_another_one_is_reported_before_anything_starts(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--workloads", f"throughput,{name}"], "minisgl_bench") == 2
    out = capsys.readouterr()
    assert f"there is no workload {name!r}; there are: throughput" in out.err
    assert out.out == ""


def test_the_ids_of_a_small_vocabulary_are_in_it() -> None:
    for vocab_size in (16, 4096, 151_936):
        first, last = ordinary_ids(vocab_size)
        assert 0 < first < last < vocab_size
    [ids] = WORKLOADS["single"].prompts(4096, 0)
    assert max(ids) < 4096
