"""A closed engine keeps no memory, whoever keeps the engine."""

from __future__ import annotations

import gc

import psutil
import pytest

from helpers.engine_runs import drive, greedy, prompts
from minisgl.builtin import model_path
from minisgl.engine import EngineConfig
from minisgl.engine.startup import start_engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_closed_engine_keeps_no_pool(dtype: str) -> None:
    """Also after decode steps that are replayed, whose recordings hold the pool."""
    engine = start_engine(
        EngineConfig(model=str(model_path()), device="cpu", dtype=dtype, num_pages=2048)
    )
    layer = engine._contexts[0].kv_pool.layer(0)
    pool_bytes = layer.k.nbytes + layer.v.nbytes
    del layer
    drive(engine, [(prompt, greedy(5)) for prompt in prompts(2)])
    before = psutil.Process().memory_info().vms
    gc.disable()
    try:
        engine.close()
        assert before - psutil.Process().memory_info().vms > pool_bytes
    finally:
        gc.enable()
