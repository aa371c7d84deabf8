"""Kernels read no memory that nothing has written: families with windows, sinks and recurrent
layers give the same tokens when all fresh memory is full of NaN and of huge numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers import fresh_memory
from helpers.family_cases import CASES, SIZES
from helpers.hybrid_cases import HYBRID_CASES
from helpers.model_harness import make_reference

RUNS = (
    "mistral", "olmo3-yarn", "exaone4-window-old", "cohere2", "gemma2", "gemma4-shared",
    "gemma4-experts", "gpt-oss", "qwen3.5", "qwen3.5-moe", "lfm3", "nemotron-h",
)  # fmt: skip
# glibc fills what malloc returns with 0x7f: 3.4e38 in float32. The tensors of torch.empty get NaN.
FILLED = {
    "FILL_FRESH_MEMORY": "1",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=128:glibc.malloc.tcache_count=0",
}


def serve_filled(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, fresh_memory.__file__, *RUNS],
        cwd=folder,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **FILLED},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def test_no_kernel_reads_memory_that_nothing_has_written(tmp_path: Path) -> None:
    cases = {**CASES, **HYBRID_CASES}
    for name in RUNS:
        config_class, changes, _, _ = cases[name]
        sizes = {**SIZES, "max_position_embeddings": 256, **changes}
        make_reference(config_class(**sizes)).save_pretrained(tmp_path / name)
    plain = {
        name: [list(each) for each in fresh_memory.tokens_of(tmp_path / name)] for name in RUNS
    }
    filled = serve_filled(tmp_path)
    assert {name for name in RUNS if plain[name] != filled[name]} == set()
