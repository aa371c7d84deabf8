"""Compares a GGUF file's tokens per second with llama.cpp's, in interleaved pairs on a CPU.

    pip install llama-cpp-python==0.3.36
    python scripts/llama_cpp_pairs.py FILE [--pairs N] [--threads N] [--json FILE]

For a machine with AVX2 only: MINISGL_CPU_ISA=avx2, and a llama.cpp that was built for AVX2. Three
tasks through `LLM.generate` and llama.cpp's Python package: 32 tokens of one stream, 32 of each of
eight, and a prompt of 512, all of random ids. Odd pairs swap the order. Prints the median of the
ratios of rates, ours over llama.cpp's, with its interval of 95 % by order statistics.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import llama_cpp as api
import numpy as np
import torch

from minisgl import LLM, SamplingParams
from minisgl_bench.report import machine_load, write_json

TASKS: Final = {"one": (1, 8), "eight": (8, 8), "prompt": (1, 512)}
"""Rows, and the tokens of a prompt."""
NUM_TOKENS: Final = 32
"""The decode steps of a stream: a short answer is subtracted from a long one."""

MOST_TOKENS: Final = 1024  # tokens of the cache, and of a call
MOST_SEQUENCES: Final = 32

Run = Callable[[torch.Tensor, int], object]


@api.llama_log_callback  # type: ignore[untyped-decorator] # no types
def _silent(level: int, text: bytes, data: object) -> None:
    pass


class LlamaCpp:
    """One model with its context. Called with prompts [B, T] and the tokens of each answer."""

    def __init__(self, path: Path, num_threads: int) -> None:
        api.llama_log_set(_silent, None)
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = MOST_TOKENS
        params.n_ubatch = 512
        params.n_seq_max = MOST_SEQUENCES
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        self._context = self._model and api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(MOST_TOKENS, 0, 1)

    def close(self) -> None:
        api.llama_batch_free(self._batch)
        api.llama_free(self._context)
        api.llama_model_free(self._model)

    def __call__(self, prompts: torch.Tensor, count: int) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        length = prompts.shape[1]
        ids = self._step(
            [
                (token, position, row, position == length - 1)
                for row, prompt in enumerate(prompts.tolist())
                for position, token in enumerate(prompt)
            ]
        )
        for position in range(length, length + count - 1):
            ids = self._step([(token, position, row, True) for row, token in enumerate(ids)])

    def _step(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute tokens: (id, position, row, whether the next id is wanted). Returns the wanted
        ids."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, is_wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp did not compute {len(tokens)} tokens")
        shape = (sum(is_wanted for *_, is_wanted in tokens), self._vocab)
        first = api.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(ctypes.cast(first, ctypes.POINTER(ctypes.c_float)), shape)
        ids: list[int] = logits.argmax(-1).tolist()
        return ids


def seconds(task: str, run: Run, generator: torch.Generator) -> float:
    """Return the wall seconds of the prompt, or of the decode steps."""
    prompts = torch.randint(10, 30000, TASKS[task], generator=generator)
    begun = time.perf_counter()
    run(prompts, 1)
    first = time.perf_counter() - begun
    if task == "prompt":
        return first
    begun = time.perf_counter()
    run(prompts, NUM_TOKENS + 1)
    return time.perf_counter() - begun - first


def interval(values: list[float]) -> tuple[float, float]:
    """Return the interval of the median of `values`, 95 %."""
    values, num = sorted(values), len(values)
    at = max(0, math.floor(num / 2 - 0.98 * math.sqrt(num)))
    return values[at], values[num - 1 - at]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("--pairs", type=int, default=20, help="default: 20")
    parser.add_argument("--threads", type=int, default=2, help="of both (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(argv)
    load, rows = machine_load(), []
    options = {"device": "cpu", "dtype": "bfloat16", "num_pages": 512, "progress": False}
    with LLM(str(args.file), threads=args.threads, **options) as llm:

        def ours(prompts: torch.Tensor, num_tokens: int) -> object:
            asked = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            return llm.generate(prompts.tolist(), asked)

        engines: dict[str, Run] = {"ours": ours, "llama.cpp": LlamaCpp(args.file, args.threads)}
        for task, (num_rows, length) in TASKS.items():
            generator = torch.Generator().manual_seed(0)
            took: dict[str, list[float]] = {name: [] for name in engines}
            for pair in range(-1, args.pairs):  # the first warms up
                for name in engines if pair % 2 else reversed(engines):
                    each = seconds(task, engines[name], generator)
                    if pair >= 0:
                        took[name].append(each)
            ratios = [b / a for a, b in zip(took["ours"], took["llama.cpp"], strict=True)]
            tokens = length if task == "prompt" else num_rows * NUM_TOKENS
            rates = {name: round(tokens / statistics.median(s), 1) for name, s in took.items()}
            row = {
                "task": task, "ratio": round(statistics.median(ratios), 3),
                "interval": [round(end, 3) for end in interval(ratios)],
                "ratios": [round(ratio, 3) for ratio in ratios], "tokens_per_s": rates,
            }  # fmt: skip
            rows.append(row)
            print(task, row["ratio"], row["interval"], rates, flush=True)
    if args.json:
        write_json(args.json, {"load_before": load, "file": args.file.name, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
