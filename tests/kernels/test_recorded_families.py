"""Decode steps of families that use ops of torch, replayed: greedy ids are transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.adapters import greedy_after, with_tokenizer
from helpers.family_cases import save_case
from minisgl.core import SamplingParams
from minisgl.engine import Engine
from minisgl.llm import LLM
from minisgl_kernels.recorded_steps import RecordingRunner

PROMPTS = [[5, 6, 7, 8, 9], [9, 3, 4] * 5, [17, 4] * 9]
COUNT = 56  # beyond the first state of recurrent layers


FAMILIES = (
    "gemma4-shared", "lfm2-moe", "qwen3-moe", "youtu", "olmo3", "ministral3", "cohere2", "qwen3.5",
    "qwen3-next-moe", "falcon-h1", "granite4-moe", "nemotron-3", "lfm3",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_steps_have_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    reference, page_size = save_case(name, tmp_path)
    with_tokenizer(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    options = {"dtype": "float32", "num_pages": 128, "page_size": max(page_size, 4)}
    with LLM(tmp_path, progress=False, **options) as llm:
        engine: Engine = llm._engine.engine  # type: ignore[attr-defined] # of one rank
        if not isinstance(engine.runner, RecordingRunner):
            pytest.skip(reason="no recorded steps here")
        answers = [each.token_ids for each in llm.generate(PROMPTS, params)]
        for prompt, ids in zip(PROMPTS, answers, strict=True):
            assert len(ids) == COUNT
            assert ids == greedy_after(reference, prompt, ids)
        assert [each.token_ids for each in llm.generate(PROMPTS, params)] == answers
        for prompt, ids in zip(PROMPTS, answers, strict=True):
            assert llm.generate([prompt], params)[0].token_ids == ids
        recorded = {rows for (rows, _), made in engine.runner._recordings.items() if made}
        assert recorded == {1, 3}
