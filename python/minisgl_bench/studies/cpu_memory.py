"""Resident memory of a CPU beside the memory table, after random batches.

One process: `LLM` with the built-in model, or with random weights of a real shape. Batches of
random sizes, lengths and sampling options run until each page of the KV pool was written, and then
for `--seconds`. The planned bytes are those of the table (weights, activations, KV pool) and those
of the interpreter with torch and this package, which are resident before the model is loaded. The
table's activations are a bound for all requests that may run, so with a real shape no more may run
than a batch has at most.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psutil

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.llm.engines import OwnEngine
from minisgl.utils.text import size_of
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES

BATCH: Final = 24  # the most requests of a batch
PROMPT: Final = 600  # the most tokens of a prompt: above a CPU's chunk
OUTPUT: Final = 32
EVERY_S: Final = 10.0  # between two entries of the JSON


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, in bfloat16")
    parser.add_argument(
        "--num-pages", type=natural, help="pages of the KV pool (default: the plan's)"
    )
    parser.add_argument("--seconds", type=natural, default=60, help="seconds of random batches")
    add_json(parser)
    args = parser.parse_args(argv)
    load = machine_load()
    interpreter = _resident()
    with ExitStack() as stack:
        options: dict[str, Any] = {
            "num_pages": args.num_pages,
            "device": "cpu",
            "progress": False,
        }
        if args.shape:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_checkpoint(folder, SHAPES[args.shape], weights=False)
            options |= {"model": folder, "dummy_weight": True, "max_running_requests": BATCH}
        llm = stack.enter_context(LLM(**options))
        assert isinstance(llm._engine, OwnEngine)
        plan = llm._engine.engine.memory
        planned = interpreter + plan.weight_bytes + plan.activation_bytes + plan.kv_bytes
        batches = _Batches(llm, llm._engine.engine.model.config.vocab_size, plan.max_seq_len)
        resident = {"loaded": _resident()}
        while batches.num_tokens < 1.1 * plan.num_tokens:
            batches.run()
        resident["each page written"] = _resident()
        end = (start := time.monotonic()) + args.seconds
        due = start
        while (now := time.monotonic()) < end:
            if now >= due:
                resident[f"after {now - start:.0f} s"] = _resident()
                due += EVERY_S
            batches.run()
        resident["end"] = _resident()
    result = {
        "load_before": load,
        "shape": args.shape or "built-in",
        "table": {
            "interpreter": interpreter,
            "weights": plan.weight_bytes,
            "activations": plan.activation_bytes,
            "kv_pool": plan.kv_bytes,
        },
        "planned_bytes": planned,
        "resident_bytes": resident,
        "num_batches": batches.count,
        "num_tokens": batches.num_tokens,
        "resident_over_planned": resident["end"] / planned,
    }
    for name, value in resident.items():
        print(
            f"{name:<20}{size_of(value):>12}  {value / planned:.3f} of {size_of(planned)} planned"
        )
    if args.json:
        write_json(args.json, result)


class _Batches:
    """Random batches, the same in each run. Mutable: it counts batches and tokens."""

    def __init__(self, llm: LLM, vocab_size: int, max_seq_len: int) -> None:
        self.count = self.num_tokens = 0
        self._llm, self._vocab_size = llm, vocab_size
        self._longest = min(PROMPT, max_seq_len - OUTPUT)
        self._draw = random.Random(0)

    def run(self) -> None:
        draw = self._draw
        count = draw.randint(1, BATCH)
        lengths = [round(self._longest ** draw.random()) for _ in range(count)]  # most are short
        prompts = [[draw.randrange(1, self._vocab_size) for _ in range(n)] for n in lengths]
        params = [
            SamplingParams(
                temperature=draw.choice((0.0, 0.7, 1.0)),
                top_k=draw.choice((0, 20)),
                top_p=draw.choice((1.0, 0.9)),
                max_tokens=draw.randint(1, OUTPUT),
                ignore_eos=True,
            )
            for _ in prompts
        ]
        self._llm.generate(prompts, params)
        self.count += 1
        self.num_tokens += sum(lengths) + sum(one.max_tokens or 0 for one in params)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
