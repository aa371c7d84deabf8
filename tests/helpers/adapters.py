"""Random LoRA adapters in PEFT's format, and transformers models with an adapter merged in."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from helpers.text_checkpoints import make
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.llm.output import RequestOutput
from minisgl.llm.prompts import prompt_records

NOT_ADAPTED = re.compile(r"lm_head|shared_expert_gate|kv_b_proj|\.gate$|\.router|latent_proj")
"""Linear layers of transformers that take no adapters here."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def linear_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """The layers that an adapter may change, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not NOT_ADAPTED.search(name)
    }


class RandomAdapter:
    """An adapter in `folder`. deltas: what it adds to the weight of each layer."""

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, int]],
        *,
        seed: int,
        rank: int = 4,
        alpha: float = 8.0,
        ranks: Mapping[str, int] | None = None,
        alphas: Mapping[str, float] | None = None,
        size: float = 0.6,
        **config: Any,
    ) -> None:
        """shapes: of the layers' weights. ranks, alphas: those of layers with another one. size: of
        the deltas beside random weights. config: more fields of adapter_config.json."""
        self.folder = folder
        self.deltas: dict[str, torch.Tensor] = {}
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, (outputs, inputs) in shapes.items():
            own = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
            scale = next((a for end, a in (alphas or {}).items() if name.endswith(end)), alpha)
            scale /= own**0.5 if config.get("use_rslora") else own
            a = torch.randn(own, inputs, generator=random) * inputs**-0.5
            b = torch.randn(outputs, own, generator=random) * size / (scale * own**0.5)
            self.deltas[name] = scale * b @ a
            for letter, tensor in (("A", a), ("B", b)):
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = tensor.contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        fields = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": dict(ranks or {}),
            "alpha_pattern": dict(alphas or {}),
            "target_modules": "all-linear",
            "bias": "none",
            **config,
        }
        (folder / "adapter_config.json").write_text(json.dumps(fields))

    @classmethod
    def of(cls, folder: Path, model: PreTrainedModel, **options: Any) -> RandomAdapter:
        """An adapter of all layers, or of those that `layers` matches."""
        pattern = re.compile(options.pop("layers", ""))
        shapes = {
            name: (layer.out_features, layer.in_features)
            for name, layer in linear_layers(model).items()
            if pattern.search(name)
        }
        return cls(folder, shapes, **options)

    @contextlib.contextmanager
    def merged(self, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """The model with the adapter, within the block."""
        layers = dict(model.named_modules())
        kept = {name: layers[name].weight.data.clone() for name in self.deltas}
        for name, delta in self.deltas.items():
            layers[name].weight.data += delta.to(kept[name].dtype)
        try:
            yield model
        finally:
            for name, weight in kept.items():
                layers[name].weight.data = weight


def greedy_ids(model: PreTrainedModel, prompt: Sequence[int], count: int = 10) -> list[int]:
    """The likeliest tokens after a prompt, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def greedy_after(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the likeliest token after a prompt and after each token of an answer but the last: the
    answer itself if and only if it is what `greedy_ids` returns. This is one pass, not one each."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    ids: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return ids


def as_batch(
    llm: LLM,
    names: Sequence[str | None],
    prompts: Sequence[list[int]],
    params: SamplingParams = GREEDY,
) -> list[RequestOutput]:
    """Compute prompts with adapters of their own as one batch."""
    messages = []
    for name, prompt in zip(names, prompts, strict=True):
        (record,) = prompt_records([prompt])[0]
        encoded = llm._encoder.encode(record)
        namespace, adapter = llm._scope("", name)
        request = llm._encoder.request(encoded, params.with_seed(0), namespace, adapter=adapter)
        messages.append(request)
    call = llm._session.call(messages, lambda *_: None, 1)
    llm._session.complete(call)
    return call.outputs()


def with_tokenizer(folder: Path) -> Path:
    """Give a checkpoint a tokenizer; the tests send ids."""
    return make(folder, "byte_level")
