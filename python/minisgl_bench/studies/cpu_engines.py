"""What `cpu_formats` compares: our engine by the format of its weights, transformers, and streams
of a server beside `LLM`, alone and with a neighbour.

The server has the processes and flags of a user's, and random weights. The neighbour is one process
that computes without a pause.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from minisgl.benchmark.client import Target
from minisgl.core import SamplingParams
from minisgl.core.args import Quantization
from minisgl.llm import LLM
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.shards import run_whole
from minisgl_bench.startup import running_server
from minisgl_bench.workload import at_once
from minisgl_zoo.gguf.folder import open_header, stored_types
from minisgl_zoo.gguf.index import WEIGHTS

Generate = Callable[[torch.Tensor, int], None]
"""Computes greedy answers to prompts [B, T], each of the given number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Our engine in one format. quantization: the option of that name. stored: the checkpoint's
    `quantization_config`; its head is bfloat16, as in AWQ and GPTQ."""

    quantization: Quantization | None = None
    stored: dict[str, Any] = field(default_factory=dict)


INT8_ROWS: Final = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}
GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
FORMATS: Final = {
    "bf16": Ours(),
    "int8": Ours(quantization="int8"),
    "int4": Ours(quantization="int4"),
    "int8, bf16 head": Ours(stored=INT8_ROWS),
    "int4, bf16 head": Ours(stored=GPTQ),
}


@contextmanager
def ours(folder: Path, values: dict[str, Any]) -> Iterator[dict[str, Generate]]:
    """Yield our engine in each format, by name. values: the content of config.json."""
    with ExitStack() as stack:
        engines: dict[str, Generate] = {}
        for index, (name, format) in enumerate(FORMATS.items()):
            checkpoint = folder / f"ours-{index}"
            write_checkpoint(checkpoint, values, weights=False)
            if format.stored:
                stored = {**values, "quantization_config": format.stored}
                (checkpoint / "config.json").write_text(json.dumps(stored))
            llm = LLM(
                checkpoint, dummy_weight=True, device="cpu", num_pages=512, progress=False,
                quantization=format.quantization,
            )  # fmt: skip
            engines[name] = partial(_generate, stack.enter_context(llm))
        yield engines


@contextmanager
def of_files(
    folder: Path, values: dict[str, Any], kinds: Iterable[str]
) -> Iterator[dict[str, Generate]]:
    """Yield our engine with llama.cpp's files KIND.gguf of `folder`, which have no tokenizer."""
    with ExitStack() as stack:
        engines: dict[str, Generate] = {}
        for kind in kinds:
            checkpoint = folder / f"gguf-{kind}"
            write_checkpoint(checkpoint, values, weights=False)
            _, tensors = open_header(folder / f"{kind}.gguf")
            stored = stored_types("qwen3", {tensor.name: tensor for tensor in tensors})
            (checkpoint / "config.json").write_text(json.dumps({**values, **stored}))
            (checkpoint / WEIGHTS).symlink_to(folder / f"{kind}.gguf")
            llm = LLM(checkpoint, device="cpu", num_pages=512, progress=False)
            engines[f"gguf {kind}"] = partial(_generate, stack.enter_context(llm))
        yield engines


def _generate(llm: LLM, prompts: torch.Tensor, count: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    llm.generate(prompts.tolist(), params)


def transformers_engine(values: dict[str, Any]) -> Generate:
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


PROMPT: Final = 8  # tokens


class Served:
    """Asks one server for streams."""

    def __init__(self, url: str, vocab_size: int, output: int) -> None:
        """output: the tokens of each stream."""
        self._target = Target(url=url, api="generate", extra={"temperature": 0.0})
        self._vocab_size, self._output = vocab_size, output
        self._rng = np.random.default_rng(0)

    def run(self, streams: int) -> dict[str, Any]:
        """Run the streams all at once. Returns the seconds, and p50 and p99 of the ITL in ms."""
        ids = self._rng.integers(1, self._vocab_size, (streams, PROMPT), dtype=np.int32)
        sessions = at_once(ids, [self._output] * len(ids))
        summary, _ = run_whole(self._target, sessions, processes=1)
        itl = summary["itl_ms"]
        return {"seconds": summary["duration_s"], "itl_p50": itl["p50"], "itl_p99": itl["p99"]}


@contextmanager
def served(folder: Path, values: dict[str, Any], output: int) -> Iterator[Served]:
    write_checkpoint(folder, values, weights=False)
    flags = ("--model", str(folder), "--dummy-weight", "--device", "cpu", "--num-pages", "512")
    with running_server(*flags) as (url, _):
        yield Served(url, values["vocab_size"], output)


@contextmanager
def neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
