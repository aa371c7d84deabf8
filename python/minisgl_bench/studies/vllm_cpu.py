"""vLLM's CPU build as an engine of `cpu_formats`, in a process of its own.

Its packages conflict with ours, so they have a folder of their own (docs/performance.md). Requests
and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.studies.cpu_engines import Generate

WORKER = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints
from vllm import LLM, SamplingParams
llm = LLM(
    model=sys.argv[1], load_format="dummy", dtype="bfloat16", enforce_eager=True,
    skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=32, enable_prefix_caching=False,
)
print("ready", file=answers, flush=True)
for line in sys.stdin:
    prompts, count = json.loads(line)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    print("done", file=answers, flush=True)
"""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_engine(folder: Path, values: dict[str, Any], packages: Path) -> Iterator[Generate]:
    """Yield vLLM. values: the content of config.json. packages: the folder of vLLM's packages."""
    write_checkpoint(folder, values, weights=False)
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "qwen3"}))
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(packages)}
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        text=True,
    ) as worker:
        assert worker.stdin
        assert worker.stdout
        requests, answers = worker.stdin, worker.stdout

        def expect(answer: str) -> None:
            if answers.readline().strip() != answer:
                raise RuntimeError(f"vLLM ended: try `import vllm` with PYTHONPATH={packages}")

        def generate(prompts: torch.Tensor, count: int) -> None:
            print(json.dumps([prompts.tolist(), count]), file=requests, flush=True)
            expect("done")

        try:
            expect("ready")
            yield generate
        finally:
            requests.close()
