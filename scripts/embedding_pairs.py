"""Compares embeddings a second with sentence-transformers', in interleaved pairs.

    pip install sentence-transformers==6.2.0
    python scripts/embedding_pairs.py FOLDER [--pairs N] [--threads N] [--json FILE]
        [--device cuda] [--dtype NAME] [--times N] [--batch N]

Three loads through `LLM.embed` and `SentenceTransformer.encode` in one process, of words of docs/:
many short texts, a mixture of lengths, and long ones; both cut texts that are too long. --times: as
many texts of each. --batch: sentence-transformers' batch size. Of a cross-encoder's folder, the
mixture is scored by `LLM.score` and `CrossEncoder.predict`. Odd pairs swap the order. Prints the
median of the ratios of rates, ours over theirs, by wall time and by CPU time of the process, each
with its interval of 95 % by order statistics, and the largest difference of a number.
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


def loads(times: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the texts of each load. At the end of the words they begin again, one word later."""
    words = " ".join(page.read_text("utf-8") for page in sorted(DOCS.glob("*.md"))).split()
    for name, counts in LOADS.items():
        texts, first = [], 0
        for n in counts * times:
            if first + n > len(words):
                words, first = words[1:] + words[:1], 0
            texts.append(" ".join(words[first : first + n]))
            first += n
        yield name, texts


def seconds(run: Run) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def compared(ours: Run, theirs: Run, pairs: int, num_texts: int) -> dict[str, Any]:
    """Return the ratios of rates, ours over theirs, and both medians of texts a second."""
    apart = float(np.abs(np.asarray(ours()) - np.asarray(theirs())).max())  # warms both, too
    ratios: list[tuple[float, ...]] = []
    walls: list[tuple[float, float]] = []
    for pair in range(pairs):
        first, second = (theirs, ours) if pair % 2 else (ours, theirs)
        times = [seconds(first), seconds(second)]
        mine, other = times[::-1] if pair % 2 else times
        ratios.append(tuple(b / a for a, b in zip(mine, other, strict=True)))
        walls.append((mine[0], other[0]))
    rates = [num_texts / statistics.median(each) for each in zip(*walls, strict=True)]
    row: dict[str, Any] = {"largest_difference": apart, "texts_per_s": rates}
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="default: 32, theirs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    load, rows = machine_load(), []
    config = json.loads((args.folder / "config.json").read_text("utf-8"))
    ranks = config["architectures"][0].endswith("Classification")
    kwargs = {"device": args.device, "model_kwargs": {"torch_dtype": args.dtype}}
    with LLM(args.folder, dtype=args.dtype, device=args.device, progress=False) as llm:
        for name, texts in loads(args.times):
            ours: Run = partial(llm.embed, texts, truncate_prompt_tokens=-1)
            theirs: Run
            if not ranks:
                peer = SentenceTransformer(str(args.folder), **kwargs)
                theirs = partial(peer.encode, texts, batch_size=args.batch)
            elif name == "mixed":
                ours = partial(llm.score, QUERY, texts, truncate_prompt_tokens=-1)
                pairs = [(QUERY, text) for text in texts]
                ranker = CrossEncoder(str(args.folder), **kwargs)
                theirs = partial(ranker.predict, pairs, batch_size=args.batch)
            else:
                continue
            row = compared(ours, theirs, args.pairs, len(texts))
            rows.append({"load": name, "texts": len(texts), **row})
            print(rows[-1], flush=True)
    if args.json:
        setting = {**vars(args), "folder": args.folder.name}
        del setting["json"]
        write_json(args.json, {"load_before": load, **setting, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
