"""Compares embeddings a second with sentence-transformers', in interleaved pairs on a CPU.

    pip install sentence-transformers==6.2.0
    python scripts/embedding_pairs.py FOLDER [--pairs N] [--threads N] [--json FILE]

Three loads through `LLM.embed` and `SentenceTransformer.encode` in one process, in float32, of
words of docs/: many short texts, a mixture of lengths, and long ones; both cut texts that are too
long. Of a cross-encoder's folder, the mixture is scored by `LLM.score` and `CrossEncoder.predict`.
Odd pairs swap the order. Prints the median of the ratios of rates, ours over theirs, by wall time
and by CPU time of the process, each with its interval of 95 % by order statistics, and the largest
difference of a number.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from minisgl import LLM
from minisgl_bench.report import machine_load, write_json

DOCS: Final = Path(__file__).parents[1] / "docs"
QUERY: Final = "How much memory does the KV cache take?"
LOADS: Final = {"short": [8] * 256, "mixed": [6, 20, 60, 150] * 24, "long": [300] * 16}
"""Words of each text."""
Run = Callable[[], Any]


def loads() -> Iterator[tuple[str, list[str]]]:
    """Yield the texts of each load."""
    words = " ".join(page.read_text("utf-8") for page in sorted(DOCS.glob("*.md"))).split()
    for name, counts in LOADS.items():
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        yield (
            name,
            [" ".join(words[end - n : end]) for end, n in zip(ends, counts, strict=True)],
        )


def seconds(run: Run) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def compared(ours: Run, theirs: Run, pairs: int) -> dict[str, Any]:
    """Return the ratios of rates, ours over theirs."""
    apart = float(np.abs(np.asarray(ours()) - np.asarray(theirs())).max())  # warms both, too
    ratios: list[tuple[float, ...]] = []
    for pair in range(pairs):
        first, second = (theirs, ours) if pair % 2 else (ours, theirs)
        times = [seconds(first), seconds(second)]
        mine, other = times[::-1] if pair % 2 else times
        ratios.append(tuple(b / a for a, b in zip(mine, other, strict=True)))
    row: dict[str, Any] = {"largest_difference": apart}
    for kind, values in zip(("wall", "cpu"), zip(*ratios, strict=True), strict=True):
        at = max(0, math.floor(pairs / 2 - 0.98 * math.sqrt(pairs)))
        ordered = sorted(values)
        row |= {kind: statistics.median(values), f"{kind}_95": (ordered[at], ordered[-1 - at])}
    return row


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of an embedder or cross-encoder")
    parser.add_argument("--pairs", type=int, default=12, help="default: 12")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    load, rows = machine_load(), []
    config = json.loads((args.folder / "config.json").read_text("utf-8"))
    ranks = config["architectures"][0].endswith("Classification")
    with LLM(args.folder, dtype="float32", device="cpu", progress=False) as llm:
        for name, texts in loads():
            ours: Run = partial(llm.embed, texts, truncate_prompt_tokens=-1)
            theirs: Run
            if not ranks:
                theirs = partial(SentenceTransformer(str(args.folder), device="cpu").encode, texts)
            elif name == "mixed":
                ours = partial(llm.score, QUERY, texts, truncate_prompt_tokens=-1)
                pairs = [(QUERY, text) for text in texts]
                theirs = partial(CrossEncoder(str(args.folder), device="cpu").predict, pairs)
            else:
                continue
            rows.append({"load": name, "texts": len(texts), **compared(ours, theirs, args.pairs)})
            print(rows[-1], flush=True)
    if args.json:
        setting = {"folder": args.folder.name, "pairs": args.pairs, "threads": args.threads}
        write_json(args.json, {"load_before": load, **setting, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
