"""The memory table is true on a CPU: resident memory stays near the plan, whatever the batches.

Planted once, and noticed: a result that is kept for each number of rows.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import random, re
import torch
import minisgl.engine, minisgl.llm.engines, minisgl.scheduler, tokenizers
from minisgl import LLM, SamplingParams

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
interpreter = anonymous()
llm = LLM(device="cpu", dtype="bfloat16", num_pages=4096, max_running_requests=64, progress=False)
engine = llm._engine.engine
for context in engine._contexts:
    for index in range(engine._pools[0].num_layers):
        layer = context.kv_pool.layer(index)
        layer.k.zero_(), layer.v.zero_()  # all pages are resident now
rng = random.Random(0)
for _ in range(12):
    prompts = [
        [rng.randrange(5, 1000) for _ in range(rng.randrange(1, 300))]
        for _ in range(rng.randrange(1, 24))
    ]
    sampling = [
        SamplingParams(
            max_tokens=rng.randrange(1, 20), temperature=rng.choice([0.0, 1.0]), ignore_eos=True
        )
        for _ in prompts
    ]
    llm.generate(prompts, sampling)
plan = engine.memory
planned = plan.weight_bytes + plan.activation_bytes + plan.kv_bytes
print(interpreter + planned, anonymous())
llm.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_is_the_plan_and_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    expected, resident = map(int, done.stdout.split()[-2:])
    assert resident <= 1.05 * expected, f"{resident:,} of {expected:,}"
    assert resident >= 0.7 * expected, "the plan counts what nobody takes"
