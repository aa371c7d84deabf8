"""Results: what they record beside the numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from helpers.benchmark_commands import online_json
from helpers.stub import Script, StubServer
from minisgl_bench import report


def test_a_result_has_the_machine_and_no_key(
    start_stub: Callable[[Script], StubServer], tmp_path: Path
) -> None:
    stub = start_stub(Script(itl_s=0.001))
    path = online_json(tmp_path, stub, "fast", "--concurrency", "3", "--repeat", "2")
    content = json.loads(path.read_text())
    assert content["environment"]["cpu"]
    assert [run["summary"]["num_requests"] for run in content["runs"]] == [6, 6]
    assert "api_key" not in content["target"]


@pytest.mark.parametrize(
    ("main", "shown"),
    [
        ("minisgl.__main__", "python -m minisgl bench x"),
        ("minisgl_bench.__main__", "python -m minisgl_bench bench x"),
        (None, "python -m minisgl bench x"),  # the console script
    ],
)
def test_a_result_has_the_command_that_was_typed(
    main: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Mock() if main else None
    if spec:
        spec.name = main
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["minisgl", "bench", "x"])
    assert report.environment()["command"] == shown
