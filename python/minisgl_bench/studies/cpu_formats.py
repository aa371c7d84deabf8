"""Decode and prefill on a CPU by format of the weights, beside the floor and transformers.

`LLM.generate` with random weights of Qwen3-0.6B's shape (`--shape`). A round runs every engine.
Other load can only add time, so the least seconds of all rounds give the rate; the JSON has each
round's seconds. The decode rate counts the tokens after the first: the time of N + 1 tokens less
the time of one. A decode step's floor is the larger of two times: the weights' bytes over the read
rate, and its FLOPs over the rate of a layer's four GEMMs (torch's, which are oneDNN's) with the
prompt's rows. A prompt's floor is the time of these GEMMs. All are measured in each round.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from minisgl.core import SamplingParams
from minisgl.core.args import Quantization
from minisgl.kernel.cpu import huge_empty
from minisgl.llm import LLM
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES

Generate = Callable[[torch.Tensor, int], None]
"""Computes greedy answers to prompts [B, T], each of the given number of tokens."""
FORMATS: Final[dict[str, Quantization | None]] = {"bf16": None, "int8": "int8", "int4": "int4"}
"""By name, the option `quantization`."""
PAIRS: Final = (
    ("bf16", "floor"),
    ("int8", "bf16"),
    ("int4", "bf16"),
    ("bf16", "transformers"),
)
READ_BYTES: Final = 1 << 29
PROMPT: Final = 8  # tokens before the decode steps
Seconds = dict[str, dict[str, list[float]]]  # the seconds of each round, by engine and task


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="the model's")
    parser.add_argument("--batch", type=natural, nargs="+", default=[1, 8, 16], help="batch sizes")
    parser.add_argument("--prompt", type=natural, default=512, help="tokens of a prefill")
    parser.add_argument("--output", type=natural, default=16, help="decode steps")
    parser.add_argument("--rounds", type=natural, default=3, help="rounds")
    parser.add_argument("--transformers", action="store_true", help="beside its `generate`")
    add_json(parser)
    args = parser.parse_args(argv)
    values = SHAPES[args.shape]
    head = {"load_before": machine_load(), "threads": torch.get_num_threads(), "shape": args.shape}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = _ours(stack, folder, values)
        if args.transformers:
            engines["transformers"] = _transformers(values)
        floor = Floor(values, args.prompt)
        seconds: Seconds = {}
        for index in range(args.rounds + 1):  # the first warms up
            found = {"floor": floor.measure()}
            for name, generate in engines.items():
                found[name] = _measure(generate, values["vocab_size"], args)
            for name, of_engine in found.items() if index else ():
                for key, value in of_engine.items():
                    seconds.setdefault(name, {}).setdefault(key, []).append(round(value, 4))
            if index:
                result = _result(seconds, floor, args)
            if index and args.json:
                write_json(args.json, head | result, is_whole=index == args.rounds)
            print(f"round {index} of {args.rounds}", flush=True)
    for name, of_pair in result["ratios"].items():
        print(f"{name}:", ", ".join(f"{key} {value:.2f}" for key, value in of_pair.items()))


def _ours(stack: ExitStack, folder: Path, values: dict[str, Any]) -> dict[str, Generate]:
    """Return our engine in each format, by name. values: the content of config.json."""
    write_checkpoint(folder, values, weights=False)
    engines: dict[str, Generate] = {}
    for name, quantization in FORMATS.items():
        llm = LLM(
            folder, dummy_weight=True, device="cpu", num_pages=512, progress=False,
            quantization=quantization,
        )  # fmt: skip
        engines[name] = partial(_generate, stack.enter_context(llm))
    return engines


def _generate(llm: LLM, prompts: torch.Tensor, count: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    llm.generate(prompts.tolist(), params)


def _transformers(values: dict[str, Any]) -> Generate:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", **{key: value for key, value in values.items() if key != "torch_dtype"}
    )
    models: Any = AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.bfloat16)

    def generate(prompts: torch.Tensor, count: int) -> None:
        with torch.inference_mode():
            result = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert result.shape[1] == prompts.shape[1] + count

    return generate


def _result(seconds: Seconds, floor: Floor, args: argparse.Namespace) -> dict[str, Any]:
    rates = {name: _rates(of_engine, args) for name, of_engine in seconds.items()}
    rates["floor"] = floor.rates(seconds["floor"], args.batch, args.prompt)
    ratios = {
        f"{a} / {b}": {key: rates[a][key] / rates[b][key] for key in rates[b]}
        for a, b in PAIRS
        if a in rates and b in rates
    }
    return {"rates": rates, "ratios": ratios, "seconds": seconds}


class Floor:
    """The least time of reading the weights and of multiplying by them."""

    def __init__(self, values: dict[str, Any], prompt: int) -> None:
        hidden, inner = values["hidden_size"], values["intermediate_size"]
        heads = values["num_attention_heads"] * values["head_dim"]
        kv = 2 * values["num_key_value_heads"] * values["head_dim"]
        matrices = ((heads + kv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))
        self._layers = values["num_hidden_layers"]
        self._layer = sum(rows * columns for rows, columns in matrices)
        self._weights = self._layers * self._layer + values["vocab_size"] * hidden
        # Beyond the caches, but for tiny shapes; in huge pages, as the engine's weights are.
        count = min(READ_BYTES, 16 * self._weights) // 8
        self._table = huge_empty((count,), torch.int64).fill_(1)
        self._gemms = [
            (torch.randn(prompt, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16())
            for outputs, inputs in matrices
        ]

    def measure(self) -> dict[str, float]:
        read_s = min(_seconds(self._table.sum) for _ in range(3))
        gemms_s = sum(
            min(_seconds(partial(F.linear, *gemm)) for _ in range(3)) for gemm in self._gemms
        )
        return {"read": read_s, "gemms": gemms_s}

    def rates(
        self, seconds: dict[str, list[float]], batches: list[int], prompt: int
    ) -> dict[str, float]:
        read = self._table.nbytes / min(seconds["read"])
        gemms_s = min(seconds["gemms"])
        per_number_s = gemms_s / self._layer / prompt
        rates = {f"prefill {prompt}": prompt / (self._layers * gemms_s)}
        for batch in batches:
            step_s = max(2 * self._weights / read, batch * self._weights * per_number_s)
            rates[f"decode {batch}"] = batch / step_s
        return rates


def _measure(generate: Generate, vocab_size: int, args: argparse.Namespace) -> dict[str, float]:
    draw = partial(torch.randint, 1, vocab_size)
    found = {f"prefill {args.prompt}": _seconds(partial(generate, draw((1, args.prompt)), 1))}
    for batch in args.batch:
        prompts = [draw((batch, PROMPT)) for _ in range(2)]
        found[f"first {batch}"] = _seconds(partial(generate, prompts[0], 1))
        found[f"all {batch}"] = _seconds(partial(generate, prompts[1], args.output + 1))
    return found


def _rates(seconds: dict[str, list[float]], args: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second, by engine and task."""
    prefill = f"prefill {args.prompt}"
    if prefill not in seconds:
        return {}
    rates = {prefill: args.prompt / min(seconds[prefill])}
    for batch in args.batch:
        decode_s = min(seconds[f"all {batch}"]) - min(seconds[f"first {batch}"])
        # On a busy machine a tiny run's first token may take as long as all.
        rates[f"decode {batch}"] = batch * args.output / decode_s if decode_s > 0 else math.nan
    return rates


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
