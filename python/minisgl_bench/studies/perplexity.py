"""The perplexity of a model on a fixed text, in each format of weights and of the KV cache.

The text is benchmarks/texts/perplexity.txt: prose of this repository's documentation, frozen. It is
cut into windows of `--window` tokens, each behind the tokenizer's first token, if it adds one. A
row is the exponential of the mean negative log-probability of all tokens but the first of each
window, and its rise over the first row.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.report import machine_load, write_json

TEXT = Path(__file__).parents[3] / "benchmarks" / "texts" / "perplexity.txt"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "KV fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
"""Of a GGUF file, "bfloat16" is the file's own numbers on a CPU, which stay packed."""


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("model", help="a checkpoint folder, a GGUF file or a model id")
    parser.add_argument("--tokens", type=natural, default=2048, help="of the text (2048)")
    parser.add_argument("--window", type=natural, default=512, help="tokens of a window (512)")
    parser.add_argument(
        "--formats", nargs="*", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT",
        help=f"some of {', '.join(FORMATS)} (all)",
    )  # fmt: skip
    add_json(parser)
    args = parser.parse_args(argv)
    load, rows, base = machine_load(), list[dict[str, Any]](), 0.0
    for name in args.formats:
        start = time.perf_counter()
        value, count = perplexity(args, **FORMATS[name])
        rows.append({"name": name, "tokens": count, "perplexity": round(value, 3)})
        base = base or value
        rise = value / base - 1
        rows[-1]["rise"] = round(rise, 4)
        seconds = time.perf_counter() - start
        print(f"{name:<10}{value:10.3f}{rise:+9.1%}   {count} tokens, {seconds:.0f} s", flush=True)
        if args.json:
            results = {"model": Path(args.model).name, "load_before": load, "rows": rows}
            write_json(args.json, results, is_whole=name == args.formats[-1])
    return 0


def perplexity(args: argparse.Namespace, **options: Any) -> tuple[float, int]:
    """Return the perplexity and the number of tokens that count."""
    with LLM(args.model, max_seq_len=args.window + 1, progress=False, **options) as llm:
        ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        plain = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
        first = ids[: 1 if ids[:1] != plain[:1] else 0]
        plain = plain[: args.tokens]
        size = args.window - len(first)
        windows = [first + plain[at : at + size] for at in range(0, len(plain), size)]
        sampling = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
        outputs = llm.generate([each for each in windows if len(each) > 1], sampling)
    values = [x for output in outputs for x in output.prompt_logprobs or () if x is not None]
    return math.exp(-sum(values) / len(values)), len(values)
