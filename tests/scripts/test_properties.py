"""`scripts/properties.py` in short: each target runs, and a finding is shrunk."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield runpy.run_path(str(ROOT / "scripts/properties.py"))


@pytest.mark.parametrize("name", ["records", "tree", "groups", "broadcasts", "steps", "answers"])
def test_a_target_runs(name: str, script: dict[str, Any]) -> None:
    script["TARGETS"][name](random.Random(0))


def test_a_finding_has_the_smallest_case_and_its_seed(script: dict[str, Any]) -> None:
    drawn = []

    def planted(rng: random.Random) -> None:
        drawn.append(rng.randrange(1000))
        assert drawn[-1] < 50

    script["TARGETS"]["planted"] = planted
    row = script["explore"]("planted", seconds=5, first_seed=7)
    assert "assert 50 < 50" in row["finding"] or drawn[-1] == 50
    assert row["seeds"][0] == 7
