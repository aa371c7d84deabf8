"""Compares `LLM` with Hugging Face transformers' `generate`: output tokens per second.

Both have the same weights, dtype, threads and prompts. Rounds are interleaved, so that a change of
the machine's speed meets both. Decoding is greedy, with a fixed number of tokens. Each round's
prompts are new, so the prefix cache has nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl_bench.arguments import add_json, add_word, benchmark_parser, natural, take_word
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument(
        "--model",
        choices=("builtin", "qwen3-0.6b"),
        default="builtin",
        help="qwen3-0.6b has random weights",
    )
    parser.add_argument("--batch", type=natural, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--input", type=natural, default=64, help="prompt tokens")
    parser.add_argument("--output", type=natural, default=64, help="output tokens")
    parser.add_argument("--rounds", type=natural, default=5, help="rounds of each")
    add_json(parser)
    add_word(parser, "--model")
    args = parser.parse_args(argv)
    take_word(parser, args, "--model")

    load = machine_load()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_path() if args.model == "builtin" else Path(scratch)
        if args.model != "builtin":
            config = {**SHAPES[args.model], "model_type": "qwen3"}
            write_checkpoint(folder, config, weights=True)
        rows = _compare(folder, args)
    if args.json:
        result = {"load_before": load, "model": args.model, "threads": torch.get_num_threads()}
        write_json(args.json, {**result, "rows": rows})


def _compare(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    reference.eval()
    vocab_size = reference.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    rows = []
    with LLM(folder, progress=False, num_pages=2048) as llm:

        def ours(prompts: torch.Tensor) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True)
            outputs = llm.generate(prompts.tolist(), params)
            assert all(output.num_output_tokens == args.output for output in outputs)

        def theirs(prompts: torch.Tensor) -> None:
            generate(reference, prompts, args.output)

        for batch in args.batch:
            rates: dict[str, list[float]] = {"minisgl": [], "transformers": []}
            for round_index in range(args.rounds + 1):  # the first warms up
                for name, run in (("minisgl", ours), ("transformers", theirs)):
                    shape = (batch, args.input)
                    prompts = torch.randint(1, vocab_size, shape, generator=generator)
                    seconds = _time(run, prompts)
                    if round_index:
                        rates[name].append(batch * args.output / seconds)
            pairs = zip(rates["minisgl"], rates["transformers"], strict=True)
            row = {
                "batch": batch,
                "input": args.input,
                "output": args.output,
                "minisgl_tokens_per_s": statistics.median(rates["minisgl"]),
                "transformers_tokens_per_s": statistics.median(rates["transformers"]),
                "ratio_median": statistics.median(a / b for a, b in pairs),
                "rounds": rates,
            }
            rows.append(row)
            print(
                f"batch {batch}: minisgl {row['minisgl_tokens_per_s']:,.1f} tokens/s, transformers "
                f"{row['transformers_tokens_per_s']:,.1f}, ratio {row['ratio_median']:.2f}",
                flush=True,
            )
    return rows


def generate(model: Any, prompts: torch.Tensor, count: int) -> None:
    """Let transformers' `model` add `count` greedy tokens to each prompt of int64 ids [B, T]."""
    with torch.inference_mode():
        result = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
            max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    assert result.shape[1] == prompts.shape[1] + count


def _time(run: Callable[[torch.Tensor], None], prompts: torch.Tensor) -> float:
    start = time.perf_counter()
    run(prompts)
    return time.perf_counter() - start
