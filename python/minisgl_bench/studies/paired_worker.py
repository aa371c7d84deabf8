"""The child of `benchmarks paired`: one `LLM` of one checkout, driven over stdin and stdout.

Run as `python -P paired_worker.py FOLDER SETTINGS` with PYTHONPATH=CHECKOUT/python; SETTINGS are
keywords of `LLM` as JSON. It uses only `LLM`, `generate` and `SamplingParams`, which old checkouts
have, too. Each line of stdin is {"prompts", "outputs", "temperature"}; each line of stdout is
{"wall_s", "cpu_s", "ids"}, after a first line with the folder of minisgl.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries must not mix with the replies

    import torch

    import minisgl
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    def reply(**values: object) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    folder, settings = sys.argv[1:]
    with LLM(folder, progress=False, **json.loads(settings)) as llm:
        reply(package=str(minisgl.__path__[0]), on_gpu=torch.cuda.is_available())
        for line in sys.stdin:
            work = json.loads(line)
            params = [
                SamplingParams(
                    temperature=work["temperature"], max_tokens=output, ignore_eos=True, seed=index
                )
                for index, output in enumerate(work["outputs"])
            ]
            cpu, wall = _cpu_s(), time.perf_counter()
            outputs = llm.generate(work["prompts"], params)
            wall_s, cpu_s = time.perf_counter() - wall, _cpu_s() - cpu
            ids = [output.token_ids for output in outputs]
            reply(wall_s=wall_s, cpu_s=cpu_s, ids=ids)


def _cpu_s() -> float:
    """CPU seconds of this process, its threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    serve()
