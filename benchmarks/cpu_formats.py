"""Decode and prefill on a CPU in bfloat16, int8 and int4, beside transformers and the floor.

`LLM.generate` with random weights of Qwen3-0.6B's shape. A round runs every engine, so a machine
that slows down affects all; a ratio is that of the best rounds, as other load only ever takes time.
A decode rate includes the prefill of 8 tokens. The floor of a decode step is the larger of the
weights' bytes over the read rate and its FLOPs over the rate of GEMMs with 512 rows, both measured
in each round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from minisgl.benchmark.arguments import add_json, benchmark_parser, natural
from minisgl.benchmark.report import machine_load, write_json
from minisgl.benchmark.shapes import SHAPES
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.core.args import Quantization
from minisgl.llm import LLM

VALUES = SHAPES["qwen3-0.6b"]
LAYERS, HIDDEN, VOCAB = 28, 1024, VALUES["vocab_size"]
MATRICES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # of a layer
NUMBERS = LAYERS * sum(rows * columns for rows, columns in MATRICES)
HEAD = VOCAB * HIDDEN
KINDS: tuple[Quantization | None, ...] = (None, "int8", "int4")
Generate = Callable[[torch.Tensor, int], None]  # prompts [B, T], output tokens of each


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--batch", type=natural, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--prompt", type=natural, default=512, help="tokens of a prefill")
    parser.add_argument("--output", type=natural, default=24, help="decode steps")
    parser.add_argument("--rounds", type=natural, default=3, help="rounds")
    parser.add_argument("--transformers", action="store_true", help="beside its `generate`")
    add_json(parser)
    args = parser.parse_args(argv)
    load = machine_load()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_path() / name, folder / name)
        (folder / "config.json").write_text(json.dumps(VALUES))
        engines: dict[str, Generate] = {}
        for kind in KINDS:
            llm = LLM(
                folder, dummy_weight=True, device="cpu", num_pages=512, progress=False,
                quantization=kind,
            )  # fmt: skip
            engines[kind or "bf16"] = partial(_ours, stack.enter_context(llm))
        if args.transformers:
            engines["transformers"] = _transformers(folder)
        results = _measure(engines, args)
    for name, values in results["ratios"].items():
        print(name, ", ".join(f"{key} {value:.2f}" for key, value in values.items()))
    if args.json:
        threads = torch.get_num_threads()
        write_json(args.json, {"load_before": load, "threads": threads, **results})


def _measure(engines: dict[str, Generate], args: argparse.Namespace) -> dict[str, Any]:
    """Rates in tokens a second of each round, and their ratios."""
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in ("floor", *engines)}
    table = torch.ones(1 << 26, dtype=torch.int64)  # 512 MiB
    x, w = torch.randn(512, 1024).bfloat16(), torch.randn(6144, 1024).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for index in range(args.rounds + 1):  # the first warms up
        read_s = min(_seconds(table.sum) for _ in range(3))
        gemm_s = min(_seconds(partial(F.linear, x, w)) for _ in range(3))
        read, gemm = table.nbytes / read_s, 2 * x.shape[0] * w.numel() / gemm_s
        found = {"floor": {f"prefill {args.prompt}": gemm / 2 / NUMBERS}}
        for batch in args.batch:
            bound_s = max(2 * (NUMBERS + HEAD) / read, 2 * batch * (NUMBERS + HEAD) / gemm)
            found["floor"][f"decode {batch}"] = batch / bound_s
        for name, generate in engines.items():
            draw = partial(torch.randint, 1, VOCAB, generator=generator)
            prefill_s = _seconds(partial(generate, draw((1, args.prompt)), 1))
            found[name] = {f"prefill {args.prompt}": args.prompt / prefill_s}
            for batch in args.batch:
                seconds = _seconds(partial(generate, draw((batch, 8)), args.output))
                found[name][f"decode {batch}"] = batch * args.output / seconds
        for name, values in found.items():
            for key, value in values.items() if index else ():
                rates[name].setdefault(key, []).append(round(value, 2))
                print(f"{name} {key}: {value:.1f} tokens/s", flush=True)

    def ratios(name: str, base: str) -> dict[str, float]:
        return {key: max(rates[name][key]) / max(best) for key, best in rates[base].items()}

    pairs = [("bf16", "floor"), ("int8", "bf16"), ("int4", "bf16")]
    pairs += [("bf16", "transformers")] if "transformers" in engines else []
    return {"rates": rates, "ratios": {f"{a} / {b}": ratios(a, b) for a, b in pairs}}


def _ours(llm: LLM, prompts: torch.Tensor, count: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    llm.generate(prompts.tolist(), params)


def _transformers(folder: Path) -> Generate:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", **{k: v for k, v in VALUES.items() if k != "torch_dtype"}
    )
    models: Any = AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.bfloat16)

    def generate(prompts: torch.Tensor, count: int) -> None:
        with torch.inference_mode():
            model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip

    return generate


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
