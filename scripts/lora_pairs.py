"""Measures what adapters cost, in interleaved rounds.

    python scripts/lora_pairs.py idle [--model MODEL] [--pairs N] [--json FILE]
    python scripts/lora_pairs.py adapters [--shape NAME] [--rounds N] [--streams N] [--json FILE]

idle: two servers on a CPU, one started with adapters that nobody uses, answer the same requests in
turn, one stream and eight. Prints the median of the ratios of rates, with over without adapters, by
wall time and by CPU time of the server's processes, each with its interval of 95 % by order
statistics. A pair is two runs, of which the first is the other one in every second pair.

adapters: one `LLM` with random weights of a shape and random adapters of rank 16 on all linear
layers answers many streams of the model alone, of one adapter and of all adapters in turn. Prints
tokens a second of each round's and the medians of their ratios to the model alone. Then an `LLM` in
float32 answers one prompt of each adapter, together and one by one: the ids must be equal. Exits
with 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import torch
from safetensors.torch import save_file

from minisgl import LLM, SamplingParams
from minisgl.builtin import model_path
from minisgl.models.loading.reading import read_config
from minisgl.utils.hf import resolve_checkpoint
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES
from own_server import Server

RANK: Final = 16
STREAMS: Final = (1, 8)


def write_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], seed: int) -> Path:
    """Write an adapter in PEFT's format. shapes: [outputs, inputs] of each layer."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in shapes.items():
        for letter, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = torch.randn(shape, generator=random) * 0.1
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = values.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def layers_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return [outputs, inputs] of the linear layers of a Llama or Qwen3, by name."""
    config = read_config(folder)
    size, wide = config.hidden_size, config.intermediate_size
    q, kv = (config.head_dim * heads for heads in (config.num_heads, config.num_kv_heads))
    attention = {"q": (q, size), "k": (kv, size), "v": (kv, size), "o": (size, q)}
    mlp = {"gate": (wide, size), "up": (wide, size), "down": (size, wide)}
    return {
        f"model.layers.{layer}.{part}.{name}_proj": shape
        for layer in range(config.num_layers)
        for part, shapes in (("self_attn", attention), ("mlp", mlp))
        for name, shape in shapes.items()
    }


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, and its interval of 95 % by order statistics."""
    ordered, count = sorted(values), len(values)
    at = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return {"median": statistics.median(values), "interval": (ordered[at], ordered[-1 - at])}


def cpu_seconds(server: Server) -> float:
    own = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def answered(server: Server, http: httpx.Client, streams: int, tokens: int) -> tuple[float, float]:
    """Return the wall seconds and CPU seconds of so many requests at one time."""
    ask = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}

    def one(index: int) -> None:
        body = {**ask, "prompt": f"Number {index} of the list is"}
        http.post(f"{server.url}/v1/completions", json=body).raise_for_status()

    wall, cpu = time.perf_counter(), cpu_seconds(server)
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(one, range(streams)))
    return time.perf_counter() - wall, cpu_seconds(server) - cpu


def idle(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    flags = ["--device", "cpu", *(["--model", args.model] if args.model else [])]
    checkpoint = resolve_checkpoint(args.model or str(model_path()))
    adapter = write_adapter(folder / "a", layers_of(checkpoint), seed=0)
    places = folder / "plain", folder / "adapted"
    for place in places:
        place.mkdir()
    servers = Server(places[0], *flags), Server(places[1], *flags, "--lora", f"a={adapter}")
    rows = []
    try:
        with httpx.Client(timeout=600) as http:
            for streams in STREAMS:
                ratios: list[tuple[float, ...]] = []
                for pair in range(-1, args.pairs):  # the first one warms
                    order = servers if pair % 2 else servers[::-1]
                    times = {s: answered(s, http, streams, args.tokens) for s in order}
                    plain, adapted = (times[server] for server in servers)
                    ratios.append(tuple(a / b for a, b in zip(plain, adapted, strict=True)))
                wall, cpu = zip(*ratios[1:], strict=True)
                rows.append({"streams": streams, "wall": interval(wall), "cpu": interval(cpu)})
                print(rows[-1], flush=True)
    finally:
        for server in servers:
            server.close()
    return {"model": Path(args.model or "built-in").name, "tokens": args.tokens, "rows": rows}


def together(
    llm: LLM, names: Sequence[str | None], prompts: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    """Return the answers' ids, which are drawn by a seed: greedy ids of random weights repeat. A
    thread for each name sends its prompts in one call."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
    count = len(names)

    def one(index: int) -> list[list[int]]:
        given = list(prompts[index::count])
        return [out.token_ids for out in llm.generate(given, params, lora=names[index])]

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(one, range(count)))
    return [found[i % count][i // count] for i in range(len(prompts))]


def adapters(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = {**SHAPES[args.shape], **({"torch_dtype": args.dtype} if args.dtype else {})}
    write_checkpoint(folder / "model", config, weights=False)
    lora = {
        f"a{i}": write_adapter(folder / f"a{i}", layers_of(folder / "model"), i)
        for i in range(args.adapters)
    }
    options: dict[str, Any] = {"dummy_weight": True, "lora": lora, "progress": False}
    high = config["vocab_size"] - 1
    prompts = [[(7 * i + j * j) % high for j in range(120)] for i in range(args.streams)]
    count = args.adapters
    kinds: dict[str, list[str | None]] = {
        "base": [None] * count, "one": ["a0"] * count, "all": list(lora)
    }  # fmt: skip
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    with LLM(folder / "model", max_running_requests=args.streams, **options) as llm:
        for turn in range(-2, args.rounds):  # the first two warm, and capture graphs
            for kind in list(kinds)[:: -1 if turn % 2 else 1]:
                begun = time.perf_counter()
                together(llm, kinds[kind], prompts, args.tokens)
                if turn >= 0:
                    spent = time.perf_counter() - begun
                    rates[kind].append(args.streams * args.tokens / spent)
    shares = {
        kind: interval([a / b for a, b in zip(rates[kind], rates["base"], strict=True)])
        for kind in ("one", "all")
    }
    print({"tokens_per_s": {k: statistics.median(v) for k, v in rates.items()}, "of_base": shares})
    found = {
        "shape": args.shape, "streams": args.streams, "tokens": args.tokens, "rank": RANK,
        "rates": rates, "of_base": shares,
    }  # fmt: skip
    if not args.checked_tokens:
        return found
    with LLM(folder / "model", dtype="float32", **options) as llm:
        batch = together(llm, list(lora), prompts[:count], args.checked_tokens)
        single = [
            together(llm, [name], [prompt], args.checked_tokens)[0]
            for name, prompt in zip(lora, prompts, strict=False)
        ]
        base = together(llm, [None], prompts[:count], args.checked_tokens)
    equal = [a == b for a, b in zip(batch, single, strict=True)]
    differ = sum(a != b for a, b in zip(batch, base, strict=True))
    print(f"{sum(equal)} of {count} answers equal alone and together, {differ} differ from base")
    verdict = all(equal) and differ == count
    return {**found, "equal": equal, "differ_from_base": differ, "verdict": verdict}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("idle", "adapters"))
    parser.add_argument("--model", help="idle: a checkpoint; default: the built-in model")
    parser.add_argument("--pairs", type=int, default=20, help="idle; default: 20")
    parser.add_argument("--shape", default="qwen3-0.6b", help="adapters; default: qwen3-0.6b")
    parser.add_argument("--dtype", help="adapters: instead of the shape's")
    parser.add_argument("--adapters", type=int, default=8, help="default: 8")
    parser.add_argument("--streams", type=int, default=64, help="adapters; default: 64")
    parser.add_argument("--rounds", type=int, default=8, help="adapters; default: 8")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer; default: 256")
    parser.add_argument(
        "--checked-tokens", type=int, default=24, help="default: 24; 0: ids are not compared"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    load = machine_load()
    with tempfile.TemporaryDirectory() as folder:
        found = {"idle": idle, "adapters": adapters}[args.what](args, Path(folder))
    if args.json:
        write_json(args.json, {"load_before": load, **found})
    return 0 if found.get("verdict", True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
