"""A first start compiles all kernels that requests need: no request waits for the compiler later.

Each case runs in a process of its own with empty caches, since a process compiles a kernel once.
Without a GPU (`TRITON_INTERPRET=1`) kernels compute nothing; their configs are listed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 160
WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
DENSE = {**WIDE, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}
EXPERTS = {
    **WIDE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
# Rows of graphs and of the engine, and prompt tokens of a step; 0 prompt tokens are measured.
PADDED, UNPADDED, UNMEASURED = (256, 256, 0), (0, 64, 0), (0, 64, 512)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "sizes", [PADDED, UNPADDED, UNMEASURED], ids=["graphs", "no graphs", "nothing measured"]
)
@pytest.mark.parametrize("attn", ["auto", "triton"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_nothing_is_compiled_after_the_start(
    config: dict[str, Any], attn: str, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "t"), "MINISGL_CACHE_DIR": str(tmp_path / "m")}
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path), attn, *map(str, sizes)],
        env={**os.environ, **caches, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    at_start, later = json.loads(result.stdout.splitlines()[-1])
    assert any("_decode" in kernel for kernel in at_start)
    assert later == []


def main(folder: Path, attn: str, max_graph_rows: int, max_running: int, chunk: int) -> None:
    """Print which kernels are compiled at the start, and which when requests come."""
    import triton

    from helpers.engine_runs import drive
    from helpers.pretended_gpu import pretend
    from minisgl.core import SamplingParams
    from minisgl.engine import EngineConfig
    from minisgl.engine.startup import start_engine

    compiled: list[str] = []
    if torch.cuda.is_available():
        triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    else:
        pretend(compiled)
    config = EngineConfig(
        model=str(folder),
        device="auto",
        attn=attn,
        num_pages=8192,
        max_running_requests=max_running,
        cuda_graph_max_bs=max_graph_rows,
        max_prefill_length=chunk or None,
        dummy_weight=True,
    )
    engine = start_engine(config)
    at_start = list(compiled)
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    def sampling(index: int) -> SamplingParams:
        filters: dict[str, Any] = {"top_k": 5} if index % 2 else {"top_p": 0.5, "min_p": 0.01}
        kinds: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, filters)
        return SamplingParams(max_tokens=rng.randrange(1, 60), seed=index, **kinds[index % 3])

    prefix = ids(700)
    waves = ((1, 1, 0), (9, 900, 0), (20, 40, 700), (256, 100, 0), (300, 3, 0), (90, 900, 0))
    for count, most, shared in waves:  # requests, prompt tokens of their own, and in common
        requests = [
            (prefix[:shared] + ids(rng.randrange(1, most + 1)), sampling(index))
            for index in range(count)
        ]
        for turns in ([0] * count, [rng.randrange(count * 2) for _ in range(count)]):
            drive(engine, requests, turns=turns, vocab_size=VOCAB)
    engine.close()
    print(json.dumps([at_start, compiled[len(at_start) :]]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
