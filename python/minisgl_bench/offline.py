"""Measures a model without a server: throughput, one stream, prefill, a common prefix.

The model has a real shape and random weights, so nothing is downloaded. The time is that of
`LLM.generate` on lists of token ids, with the texts of the answers. Each workload runs once, which
may compile new shapes, then `--repeats` times with fresh ids that no prefix cache has; the median
counts. On a GPU the floor of `minisgl_bench.floor` follows each time, and the number of requests
whose keys, values and states fit this GPU at once, if it is not all.

At the end the same greedy prompts are answered twice. Different ids are an error.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from minisgl.core import SamplingParams
from minisgl.core.args import KVCacheDType
from minisgl.llm import LLM
from minisgl.server.flags import integer
from minisgl.utils.logger import setup_logging
from minisgl_bench.arguments import (
    above_zero,
    add_json,
    add_word,
    benchmark_parser,
    natural,
    take_word,
)
from minisgl_bench.card import card_memory, card_rates
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.floor import Shape, floor_fields
from minisgl_bench.lengths import WORKLOADS, Workload, workloads
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import QUANTISED, SHAPES, shape_of

DOOR = "LLM.generate"
TINY_SCALE = 1 / 16  # the workloads of `--shape tiny` take seconds on a CPU
GREEDY = Workload(name="greedy", requests=((5, 16), (100, 16), (300, 16), (700, 16)))


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="shape of the model")
    add(
        "--workloads",
        default="throughput,single,prefill,shared",
        help=f"with commas: {', '.join(WORKLOADS)}, batchN",
    )
    add("--repeats", type=natural, default=3, help="runs of each workload after the first")
    add("--scale", type=above_zero, help="factor for all lengths (default: 1, tiny 1/16)")
    add("--quantization", choices=QUANTISED, help="as the server's flag, like the next five")
    add(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDType),
        default="auto",
        help="dtype of the cache",
    )
    add("--attn", default="auto", help="backends of attention")
    add("--page-size", type=natural, default=16, help="tokens")
    add("--max-prefill-length", type=natural, default=None, help="default: the device's best chunk")
    add("--cuda-graph-max-bs", type=integer(0), default=256, help="rows")
    add_json(parser)
    add_word(parser, "--shape")
    args = parser.parse_args(argv)
    take_word(parser, args, "--shape")
    setup_logging("offline")

    scale = args.scale or (TINY_SCALE if args.shape == "tiny" else 1.0)
    works = [work.scaled(scale) for work in workloads(args.workloads)]
    values, on_gpu = SHAPES[args.shape], torch.cuda.is_available()
    load = machine_load()
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), values, weights=False)
        started = time.perf_counter()
        llm = LLM(
            name,
            dummy_weight=True,
            attn=args.attn,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            page_size=args.page_size,
            max_prefill_length=args.max_prefill_length,
            cuda_graph_max_bs=args.cuda_graph_max_bs,
            progress=False,
        )
        build_s = time.perf_counter() - started
    with llm:
        rates = card_rates() if on_gpu else {}
        print(f"{args.shape}: LLM ready in {build_s:.1f} s {rates or ''}")
        bench = Bench(llm, values["vocab_size"])
        kv_itemsize = 2 if args.kv_cache_dtype == "auto" else 1
        shape = shape_of(values, args.quantization, kv_itemsize) if on_gpu else None
        rows = [_measure(bench, work, args.repeats, shape) for work in works]
        greedy = bench.check_greedy()
    print(f"greedy ids: {greedy}")
    if args.json:
        result = {"load_before": load, "shape": args.shape, "gpus": int(on_gpu), "scale": scale}
        result |= {"quantization": args.quantization, "attn": args.attn}
        result |= {"kv_cache_dtype": args.kv_cache_dtype}
        result |= {"build_s": round(build_s, 2), "greedy": greedy}
        write_json(args.json, {**result, **rates, "rows": rows})
    return 0 if greedy["repeats_equal"] else 1


class Bench:
    """Runs workloads through one `LLM`. Mutable: it counts the runs."""

    def __init__(self, llm: LLM, vocab_size: int) -> None:
        self._llm, self._vocab_size = llm, vocab_size
        self._num_runs = itertools.count()

    def seconds(self, work: Workload) -> tuple[float, float]:
        """Run the workload with fresh ids. Returns (wall seconds, CPU seconds of the process)."""
        prompts = work.prompts(self._vocab_size, seed=next(self._num_runs))
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = self._llm.generate(prompts, _params(work))
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        lengths = [len(output.token_ids) for output in outputs]
        assert lengths == [output for _, output in work.requests]
        return seconds

    def check_greedy(self) -> dict[str, Any]:
        """Answer the prompts of `GREEDY` twice, always with a cold cache."""
        prompts = GREEDY.prompts(self._vocab_size, seed=next(self._num_runs))
        first, second = (
            [x.token_ids for x in self._llm.generate(prompts, _params(GREEDY), cache_salt=salt)]
            for salt in ("first", "second")
        )
        return {
            "prompts": len(prompts), "tokens": GREEDY.tokens, "repeats_equal": first == second
        }  # fmt: skip


def _params(work: Workload) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=work.temperature, max_tokens=output, ignore_eos=True, seed=index)
        for index, (_, output) in enumerate(work.requests)
    ]


def _measure(bench: Bench, work: Workload, repeats: int, shape: Shape | None) -> dict[str, Any]:
    """Run a workload and return its row. shape: for the floor, whose rates are an H200's; without
    it, the row has no floor."""
    first_s, _ = bench.seconds(work)
    times, cpu = zip(*(bench.seconds(work) for _ in range(repeats)), strict=True)
    seconds = statistics.median(times)
    rate = work.tokens / seconds
    row = {
        "workload": work.name,
        "door": DOOR,
        "requests": len(work.requests),
        "tokens": work.tokens,
        "seconds": round(seconds, 4),
        "all_seconds": [round(x, 4) for x in times],
        "tokens_per_s": round(rate, 1),
        "first_run_s": round(first_s, 4),
        "first_over_later": round(first_s / seconds, 3),
        "cpu_s": round(statistics.median(cpu), 4),
    }
    said = ""
    if shape:
        floor = floor_fields(
            shape, work.requests, seconds, shared=work.shared, memory=card_memory()
        )
        row |= floor
        said = f"   floor {floor['floor_s']:.3f} s, {floor['of_floor']:.2f} of it"
        if "rows_at_once" in floor:
            said += f", {floor['rows_at_once']} requests fit at once"
    print(
        f"{work.name:<12}{seconds:9.3f} s {rate:12,.0f} tok/s{said}   "
        f"runs {row['all_seconds']}, first {first_s:.3f} s ({first_s / seconds:.2f} times)"
    )
    return row
