"""Sends a server the requests of a recording: the same arrivals, lengths and common prefixes.

The requests of a recording (`--record`) come again at their times, with random tokens: equal
blocks have equal tokens. Further flags are those of `minisgl bench online`, such as --speed 2.
With `--plans` no server is asked: the scheduler plans the recorded steps again over the fake
executor (`minisgl_bench.replay_plans`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl_bench import online
from minisgl_bench.arguments import benchmark_parser
from minisgl_bench.recording import requests_of
from minisgl_gateway.watch.recorder import BLOCK_TOKENS

PERCENTILES: Final = (50, 90, 99)


def write_trace(requests: list[dict[str, Any]], path: Path) -> None:
    """Write the requests in the form of Qwen-Bailian's traces: blocks of 16, times in seconds."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            block_tokens = request.get("block_tokens", BLOCK_TOKENS)
            row = {
                "chat_id": request["uid"],
                "timestamp": request["at_s"],
                "input_length": request["input_length"],
                "output_length": max(request["output_length"], 1),
                "hash_ids": _of_trace(request["hash_ids"], block_tokens),
            }
            file.write(json.dumps(row) + "\n")


def _of_trace(hash_ids: list[int], block_tokens: int) -> list[int]:
    """Return the digests at the ends of a trace's blocks: each is of all tokens before it."""
    each = BLOCK_TOKENS // block_tokens
    rest = hash_ids[-1:] if len(hash_ids) % each else []
    return hash_ids[each - 1 :: each] + rest


def summary(requests: list[dict[str, Any]]) -> str:
    """Return a text with the times and the cached share of the recorded requests."""
    done = [request for request in requests if "queued_s" in request]
    first = [1e3 * (request["queued_s"] + request["prefill_s"]) for request in done] or [0.0]
    whole = [
        1e3 * (request["queued_s"] + request["prefill_s"] + request["decode_s"]) for request in done
    ] or [0.0]
    prompt = sum(request["input_length"] for request in done)
    cached = sum(request["cached_tokens"] for request in done)
    seconds = requests[-1]["at_s"] - requests[0]["at_s"]
    lines = [
        f"recorded: {len(requests)} requests in {seconds:.1f} s, "
        f"{len(requests) - len(done)} failed, {cached / max(prompt, 1):.0%} of the prompt tokens "
        "from the prefix cache"
    ]
    for name, values in (("to the first token", first), ("to the end", whole)):
        points = np.percentile(values, PERCENTILES)
        shown = ", ".join(f"p{p} {value:.1f}" for p, value in zip(PERCENTILES, points, strict=True))
        lines.append(f"  ms {name}, in the engine: {shown}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.prog = "minisgl replay"
    parser.usage = "minisgl replay FILE [--plans | flags of minisgl bench online]"
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording of --record FILE")
    parser.add_argument(
        "--plans",
        action="store_true",
        help="let the scheduler plan the recorded steps again, over a fake device that checks the "
        "KV cache, and say where a plan differs; needs a recording from its start",
    )
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, help="flags of minisgl bench online"
    ).required = False
    args = parser.parse_args(argv)
    flags = [flag for flag in args.flags if flag != "--plans"]
    if args.plans or len(flags) < len(args.flags):
        if flags:
            parser.error(f"--plans asks no server: leave out {' '.join(flags)}")
        from minisgl_bench.replay_plans import replay_plans

        print(replay_plans(args.file))
        return 0
    requests = requests_of(args.file)
    print(summary(requests), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / args.file.name
        write_trace(requests, trace)
        return online.main(["--workload", "trace", "--trace", str(trace), *flags])
