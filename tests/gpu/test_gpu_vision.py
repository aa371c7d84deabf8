"""Pictures on a GPU: the tower, the places of its rows, three positions, and CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import pictures
from helpers.pictures import PICTURES, chat
from helpers.seen import Eyes, check
from minisgl.engine import EngineConfig
from minisgl.engine.startup import start_engine

FAMILIES = (
    *("mistral3", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4"),
    *("gemma4_e2b", "gemma4_unified", "lfm2_vl", "lfm2_vl_moe"),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("graphs", [0, 8])
def test_pictures_on_a_gpu(
    family: str, graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, so transformers on the CPU is the reference; decode steps run in graphs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the towers' convolutions
    sample = getattr(pictures, family)(tmp_path / "model")
    config = EngineConfig(
        model=str(sample.folder),
        device="cuda",
        dtype="float32",
        num_pages=256,
        max_running_requests=8,
        max_prefill_length=96,
        cuda_graph_max_bs=graphs,
    )
    engine = start_engine(config, measure_steps=False)
    eyes = Eyes(sample, engine)
    shown = [PICTURES[:2], PICTURES[1:4], [], PICTURES[:1]]
    runs = []
    for _ in range(2):  # the second time from the prefix cache
        answers = eyes.ask([chat(*each) for each in shown], max_tokens=8)
        for answer, each in zip(answers, shown, strict=True):
            check(sample, answer, each)
        runs.append(engine.vision.num_runs)
    assert runs[0] == runs[1] >= 4  # a picture of LFM2-VL is several tiles
    engine.close()
