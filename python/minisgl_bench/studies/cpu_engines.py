"""What `cpu_formats` compares: our engine by the format of its weights, and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from minisgl.core import SamplingParams
from minisgl.core.args import Quantization
from minisgl.llm import LLM
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_zoo.gguf.folder import open_header, stored_types
from minisgl_zoo.gguf.index import WEIGHTS

Generate = Callable[[torch.Tensor, int], None]
"""Computes greedy answers to prompts [B, T], each of the given number of tokens."""


FORMATS: Final[dict[str, Quantization | None]] = {"bf16": None, "int8": "int8", "int4": "int4"}
"""By name, the option `quantization`."""


@contextmanager
def ours(folder: Path, values: dict[str, Any]) -> Iterator[dict[str, Generate]]:
    """Yield our engine in each format, by name. values: the content of config.json."""
    with ExitStack() as stack:
        engines: dict[str, Generate] = {}
        write_checkpoint(folder / "ours", values, weights=False)
        for name, quantization in FORMATS.items():
            llm = LLM(
                folder / "ours", dummy_weight=True, device="cpu", num_pages=512, progress=False,
                quantization=quantization,
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
