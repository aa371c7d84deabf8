"""An `LLM` of one rank imports nothing that only servers, several ranks or downloads need."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from minisgl.llm import LLM, SamplingParams

with LLM(device="cpu", num_pages=64, progress=False) as llm:
    assert llm.generate("Hello", SamplingParams(max_tokens=2))[0].token_ids
ours = {name for name in sys.modules if name.startswith("minisgl.")}
print(sorted(ours & set(sys.argv[1].split()) | {name for name in ours if "server" in name}))
print(sorted({"zmq", "rich", "huggingface_hub", "fastapi", "transformers"} & set(sys.modules)))
"""

NOT_NEEDED = (
    "minisgl.runtime.workers minisgl.runtime.signals "
    "minisgl.llm.ranks minisgl.utils.zmq minisgl.utils.process "
    "minisgl.utils.hub minisgl.tokenizer.worker minisgl_zoo.convert minisgl_zoo.calls.plan"
)


def test_one_rank_imports_no_supervision() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, NOT_NEEDED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MINISGL_DISABLE_JIT": "1"},
    )
    assert done.stdout.splitlines() == ["[]", "[]"]
