"""Checkpoints in a quantised format, beside the same numbers in float32, and runs of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from helpers.family_cases import SIZES
from helpers.local_ranks import ranks
from helpers.model_harness import Runner, Sequence, load, make_reference, random_ids
from minisgl import plugins

Quantise = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""(module, weight [O, I]) -> the tensors of the format by their names below the module, and the
numbers for which they stand, float32 [O, I]."""

PROMPT = random_ids(19, 3)
NUM_OUTPUTS = 6
TOLERANCE = 1e-5
"""Of the largest logit: our float32 against the same arithmetic of dequantised weights."""
HALF_BLOCKS: dict[str, Any] = {
    **SIZES,
    "hidden_size": 192,
    "intermediate_size": 320,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Sizes of a model; 192 and 320 end in half a block of 128."""


def is_linear(name: str, tensor: Tensor) -> bool:
    """Return whether it is the weight of a linear layer that is usually quantised."""
    others = ("embed", "lm_head", "mlp.gate.", "mixer.gate.", "shared_expert_gate")
    return tensor.dim() == 2 and not any(other in name for other in others)


def save_both(
    config: PreTrainedConfig,
    quantization: dict[str, Any],
    quantise: Quantise,
    folder: Path,
    is_quantised: Callable[[str, Tensor], bool] = is_linear,
) -> dict[str, Tensor]:
    """Save a random model quantised to `folder`/quantised, and dequantised to `folder`/float32.

    Returns the tensors of the former.
    """
    make_reference(config).save_pretrained(folder / "float32", save_original_format=True)
    file = folder / "float32" / "model.safetensors"
    dequantised, quantised = load_file(file), {}
    for name, tensor in dequantised.items():
        if not is_quantised(name, tensor):
            quantised[name] = tensor
            continue
        module = name.removesuffix(".weight")
        tensors, dequantised[name] = quantise(module, tensor)
        quantised.update({f"{module}.{kind}": each for kind, each in tensors.items()})
    save_file(dequantised, file, metadata={"format": "pt"})
    (folder / "quantised").mkdir()
    values = json.loads((folder / "float32" / "config.json").read_text())
    values["quantization_config"] = quantization
    (folder / "quantised" / "config.json").write_text(json.dumps(values))
    save_quantised(quantised, folder)
    return quantised


def save_quantised(tensors: dict[str, Tensor], folder: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "quantised" / "model.safetensors")


def run(folder: Path, **options: Any) -> tuple[Tensor, list[int]]:
    """Return the logits of a prompt and of its greedy tokens, and these tokens."""
    with torch.inference_mode():
        sequence = Sequence(PROMPT, NUM_OUTPUTS)
        Runner(load(folder, **options), page_size=4).generate([sequence], chunk=7)
    return torch.cat(sequence.logits), sequence.outputs


def run_ranks(folder: Path, size: int = 2, **options: Any) -> list[tuple[Tensor, list[int]]]:
    """Return the results of `run` on each of several ranks."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda comm: run(folder, comm=comm, **options), ranks(size)))


def transformers_ids(folder: Path) -> list[int]:
    """Return the greedy tokens of transformers for the same prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(NUM_OUTPUTS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def read_formats(values: dict[str, Any], where: str) -> Any:
    """Return the formats of a quantization_config whose files name modules as layers do."""
    read = plugins.need("weight_formats", values["quant_method"], where)
    return read(values, where, lambda module: (module,))
