"""The layer of multi-token prediction on a GPU, in float32, with graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.engine_runs import drive, greedy
from helpers.guessing import (
    PROMPTS,
    SAMPLING,
    Watched,
    check_guesses,
    engine_of,
    reference_output,
    scheduler_of,
)
from helpers.predicting import CASES, save_predicting
from minisgl_zoo.drafts import rule as rule_module


@pytest.fixture(autouse=True)
def drafts_whatever_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "LEAST_GAIN", 0.0)


@pytest.mark.parametrize("graphs", [0, 16])
@pytest.mark.parametrize("case", CASES)
def test_guesses_are_the_references(case: str, graphs: int, tmp_path: Path) -> None:
    model = save_predicting(tmp_path, case)
    engine = engine_of(model, device="cuda", cuda_graph_max_bs=graphs)
    scheduler = scheduler_of(engine, max_prefill_tokens=16)
    watched: Any = Watched(engine)
    asked = [(prompt, greedy(24)) for prompt in PROMPTS]
    outputs = drive(watched, asked, turns=[0, 0, 3, 5], scheduler=scheduler)
    for uid, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        assert output == reference_output(model, prompt, output)
        assert check_guesses(model, watched, uid, len(prompt), prompt + output) == 24
    assert scheduler.stats.num_drafted > 40
    engine.close()


@pytest.mark.parametrize("graphs", [0, 16])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_the_same_and_guesses_are_accepted(
    case: str, graphs: int, tmp_path: Path
) -> None:
    model = save_predicting(tmp_path, case, is_certain=True)
    off, on = (
        engine_of(model, device="cuda", cuda_graph_max_bs=graphs, drafts=drafts)
        for drafts in ("off", "mtp")
    )
    for name, params in SAMPLING.items():
        asked = [(prompt, params) for prompt in PROMPTS]
        expected = drive(off, asked, turns=[0, 1, 2, 6], scheduler=scheduler_of(off))
        scheduler = scheduler_of(on)
        assert drive(on, asked, turns=[0, 1, 2, 6], scheduler=scheduler) == expected, name
        assert scheduler.stats.num_accepted > 10
    off.close()
    on.close()
