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

from minisgl.benchmark.arguments import add_json, add_word, benchmark_parser, natural, take_word
from minisgl.benchmark.report import machine_load, write_json
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.llm import LLM

# The sizes of Qwen/Qwen3-0.6B (its config.json); the weights here are random.
QWEN3_0_6B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}


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
        folder = model_path() if args.model == "builtin" else _random_qwen3(Path(scratch))
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
            with torch.inference_mode():
                result = reference.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=False,
                    max_new_tokens=args.output,
                    min_new_tokens=args.output,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            assert result.shape[1] == prompts.shape[1] + args.output

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


def _time(run: Callable[[torch.Tensor], None], prompts: torch.Tensor) -> float:
    start = time.perf_counter()
    run(prompts)
    return time.perf_counter() - start


def _random_qwen3(folder: Path) -> Path:
    """Write a checkpoint of Qwen3-0.6B's shape with random weights and the built-in tokenizer."""
    import shutil

    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        Qwen3ForCausalLM(Qwen3Config(dtype="bfloat16", **QWEN3_0_6B)).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder / name)
    return folder
