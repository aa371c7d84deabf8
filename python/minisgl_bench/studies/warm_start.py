"""Costs and savings of a hybrid's prefix cache, through `LLM.generate`.

*Warm start*: the time of one token for a prompt whose first 4,096 tokens and `--gap` more are
cached; the saved state is that after 4,096. It is compared in pairs with a fresh prompt of as many
tokens as the warm one computes, `--gap` and `--new`. The ratio may be 1.1, beside the state's load.

*Unrelated*: requests without common prefixes, by `cache="radix"` and `cache="naive"`, in pairs. The
pools hold two rounds, so that from the third round on each page evicts another. The ratio may be
1.02.

Ratios are geometric means with a bootstrap interval of 95 %. A GPU compares wall seconds, a CPU
CPU seconds of the process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.core import SamplingParams
from minisgl.core.args import CacheKind
from minisgl.llm import LLM
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.lengths import Workload
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES, shape_of
from minisgl_bench.studies.paired import PAGE_SIZE, interval

MATCH = 4096
CACHES: tuple[CacheKind, ...] = ("naive", "radix")
SMALL = {
    **SHAPES["qwen3.6-27b"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "vocab_size": 4096,
}
"""Four layers of a Qwen3.5-2B, for a CPU. In a narrower model reading 4,096 cached keys takes more
time than the products of 148 tokens."""
HYBRIDS = {name: values for name, values in SHAPES.items() if "linear_num_value_heads" in values}


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--shape", choices=("small", *HYBRIDS), default="small", help="shape of the model")
    add("--layers", type=natural, help="the model's layers, a multiple of 4 (default: the shape's)")
    add("--gap", type=natural, default=48, help="cached tokens beyond the last state, below 64")
    add("--new", type=natural, default=100, help="tokens of a warm prompt that are not cached")
    add(
        "--requests",
        type=natural,
        default=64,
        help="requests of a round without common prefixes, 512 tokens in",
    )
    add("--output", type=natural, default=64, help="tokens of each of them")
    add("--rounds", type=natural, default=8, help="pairs of unrelated rounds; warm starts: 5 times")
    add_json(parser)
    args = parser.parse_args(argv)
    values = SMALL if args.shape == "small" else HYBRIDS[args.shape]
    values = {**values, "num_hidden_layers": args.layers or values["num_hidden_layers"]}
    work = Workload(
        name="unrelated", requests=((512, args.output),) * args.requests, temperature=0.0
    )
    tokens = max(sum(map(sum, work.requests)), 2 * MATCH)
    load = machine_load()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_checkpoint(Path(folder), values, weights=False)
        llms = {
            cache: stack.enter_context(
                LLM(
                    folder, dummy_weight=True, cache=cache, page_size=PAGE_SIZE, progress=False,
                    num_pages=2 * tokens // PAGE_SIZE,
                    max_running_requests=args.requests,
                    cuda_graph_max_bs=args.requests,
                )
            )
            for cache in CACHES
        }  # fmt: skip
        vocab_size = values["vocab_size"]
        rows = [
            warm_start(llms["radix"], args.gap, args.new, 5 * args.rounds, vocab_size),
            unrelated(llms, work, args.rounds, vocab_size),
        ]
    if args.json:
        state_bytes = shape_of(values).state_bytes
        result = {"load_before": load, "shape": args.shape, "layers": values["num_hidden_layers"]}
        write_json(args.json, {**result, "state_bytes": state_bytes, "rows": rows})
    return 0


def warm_start(llm: LLM, gap: int, new: int, pairs: int, vocab_size: int) -> dict[str, Any]:
    """Measure warm starts. Raises RuntimeError if a warm prompt did not start at the state."""
    rng = np.random.default_rng(0)

    def first_token(prompt: list[int], cached: int) -> None:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        if output.num_cached_tokens != cached:
            raise RuntimeError(f"{output.num_cached_tokens} tokens were cached, expected {cached}")

    def drawn(count: int) -> list[int]:
        return list(map(int, rng.integers(0, vocab_size - 1, count)))

    stem = drawn(MATCH + gap)
    first_token([*stem, *drawn(1)], 0)
    calls: dict[str, Callable[[], None]] = {
        "fresh": lambda: first_token(drawn(gap + new), 0),
        "warm": lambda: first_token([*stem, *drawn(new)], MATCH),
    }
    return _compared("warm start", calls, pairs)


def unrelated(
    llms: dict[CacheKind, LLM], work: Workload, pairs: int, vocab_size: int
) -> dict[str, Any]:
    output = work.requests[0][1]
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
    seeds = {cache: iter(range(1, 1 << 20)) for cache in llms}  # the same for both

    def call(cache: CacheKind) -> None:
        llms[cache].generate(work.prompts(vocab_size, seed=next(seeds[cache])), params)

    calls: dict[str, Callable[[], None]] = {
        "naive": lambda: call("naive"),
        "radix": lambda: call("radix"),
    }
    return _compared(work.name, calls, pairs)


def _compared(name: str, calls: dict[str, Callable[[], None]], pairs: int) -> dict[str, Any]:
    """Time both calls in pairs, in alternating order, after two to warm up. The ratio is the second
    call's time over the first's."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    seconds: dict[str, list[float]] = {each: [] for each in calls}
    for number in range(pairs + 2):
        for each in calls if number % 2 else reversed(calls):
            started = clock()
            calls[each]()
            seconds[each].append(clock() - started)
    base, other = (times[2:] for times in seconds.values())
    ratio, low, high = interval([b / a for a, b in zip(base, other, strict=True)])
    medians = {
        f"{each}_s": round(float(np.median(times[2:])), 6) for each, times in seconds.items()
    }
    print(
        f"{name}: {' over '.join(reversed(calls))} {ratio:.4f} [{low:.4f}, {high:.4f}], "
        f"{pairs} pairs, medians {medians}",
        flush=True,
    )
    ratios = {"ratio": round(ratio, 4), "ratio_low": round(low, 4), "ratio_high": round(high, 4)}
    return {"name": name, "pairs": pairs, **ratios, **medians}
