"""The held-out prompts that the built-in model answers with quantised weights.

The suite is that of training/ (`training.corpus.suite`), greedy. An answer is right if its text is
exactly the expected one. "as many" is the number of right answers over that without quantising.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.core.args import Quantization
from minisgl.llm import LLM
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.report import machine_load, write_json

KINDS: tuple[Quantization | None, ...] = (None, "fp8", "int8", "int4")
MAX_TOKENS = 420


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--count", type=natural, default=20, help="prompts of each row (20)")
    add_json(parser)
    args = parser.parse_args(argv)
    load = machine_load()
    rows = measure(args)
    for row in rows:
        print(
            f"{row['quantization']:<6}{row['right']:>6} of {row['prompts']} right "
            f"({row['as_many']:.1%} as many), {row['equal']:.1%} of the texts are equal"
        )
    if args.json:
        write_json(args.json, {"load_before": load, "rows": rows})
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    from training.corpus import suite  # a package of the repository, beside this one

    conversations = [each for row in suite(args.count).values() for each in row]
    conversations.sort(key=lambda each: not each.raw)
    rows: list[dict[str, Any]] = []
    plain: list[str] = []
    for kind in KINDS:
        with LLM(str(model_path()), quantization=kind, progress=False) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
            raw = [each.prompt[0].content + "\n" for each in conversations if each.raw]
            chats = [_messages(each) for each in conversations if not each.raw]
            outputs = llm.generate(raw, params) + llm.chat(chats, params)
        answers = [output.text for output in outputs]
        plain = plain or answers
        right = sum(a == c.expected for a, c in zip(answers, conversations, strict=True))
        rows.append(
            {
                "quantization": kind or "none",
                "prompts": len(answers),
                "right": right,
                "as_many": right / (rows[0]["right"] if rows else right),
                "equal": sum(map(str.__eq__, answers, plain)) / len(answers),
            }
        )
    return rows


def _messages(conversation: Any) -> list[dict[str, Any]]:
    return [{"role": m.role, "content": m.content} for m in conversation.prompt]
