"""The fixed workloads, and commands that are asked for another."""

from __future__ import annotations

import pytest

from minisgl.benchmark.__main__ import main
from minisgl.benchmark.lengths import lengths_of


def test_the_workloads_are_those_of_the_tables() -> None:
    throughput = lengths_of("throughput")
    assert len(throughput) == 256
    assert all(100 <= length <= 1024 for request in throughput for length in request)
    # As benchmarks/results count them.
    assert [sum(tokens) for tokens in zip(*throughput, strict=True)] == [145_184, 152_466]
    assert lengths_of("mixed").count((6000, 64)) == 8
    assert lengths_of("batch3") == [(128, 256)] * 3


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("offline", "nope"), ("offline", ""), ("stalls", "nope"), ("stalls", "")),
        *(("serving", name) for name in ("nope", "", "batch", "batch0", "8")),
    ],
)
def test_another_one_is_told_before_anything_starts(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    package = "benchmarks" if command == "stalls" else "minisgl.benchmark"
    assert main([command, "--workloads", f"throughput,{name}"], package) == 2
    out = capsys.readouterr()
    assert f"there is no workload {name!r}; there are: throughput" in out.err
    assert out.out == ""
