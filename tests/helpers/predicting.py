"""Checkpoints with a layer of multi-token prediction, and a reference of what it guesses.

The reference is written from section 2.2 of DeepSeek-V3's report, around transformers' model and
one more of its layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, Glm4MoeConfig, PreTrainedModel

from helpers.family_cases import DEEPSEEK, GLM4_MOE, SIZES
from helpers.model_harness import make_reference

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "glm4-moe": (Glm4MoeConfig, {**GLM4_MOE, "use_qk_norm": True, "n_shared_experts": 2}),
    "deepseek-v3": (DeepseekV3Config, DEEPSEEK),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicting:
    """layers: the model with one layer more, which is that of multi-token prediction. extra: its
    other tensors, by the end of their names."""

    folder: Path
    layers: PreTrainedModel
    extra: dict[str, Tensor]

    @torch.no_grad()
    def guess_logits(self, ids: list[int]) -> Tensor:
        """Return the logits of the token after the next one at each position but the last."""
        model, norm = self.layers.model, torch.nn.functional.rms_norm
        size, eps = self.layers.config.hidden_size, self.layers.config.rms_norm_eps
        *first, last = model.layers
        model.layers = torch.nn.ModuleList(first)
        states = model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
        model.layers = torch.nn.ModuleList([*first, last])
        tokens = model.embed_tokens(torch.tensor([ids[1:]]))
        both = (
            norm(tokens, (size,), self.extra["enorm.weight"], eps),
            norm(states, (size,), self.extra["hnorm.weight"], eps),
        )
        x = torch.cat(both, dim=-1) @ self.extra["eh_proj.weight"].T
        count = x.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotation = model.rotary_emb(x, positions)
        x = last(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        x = norm(x, (size,), self.extra["shared_head.norm.weight"], eps)
        return self.layers.lm_head(x)[0]

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Return the model's own logits."""
        *first, last = self.layers.model.layers
        self.layers.model.layers = torch.nn.ModuleList(first)
        logits: Tensor = self.layers(torch.tensor([ids]), use_cache=False).logits[0]
        self.layers.model.layers = torch.nn.ModuleList([*first, last])
        return logits


def save_predicting(folder: Path, case: str, *, is_certain: bool = False) -> Predicting:
    """Write a checkpoint with random weights. is_certain: its next token depends on the last one
    only, and the layer knows it, so that each guess is right."""
    kind, values = CASES[case]
    config = kind(**SIZES | values | {"num_hidden_layers": 4})
    model = make_reference(config)
    size = config.hidden_size
    extra = {
        "eh_proj.weight": torch.randn(size, 2 * size) * (2 * size) ** -0.5,
        **{
            f"{name}.weight": 1 + 0.3 * torch.randn(size)
            for name in ("enorm", "hnorm", "shared_head.norm")
        },
    }
    if is_certain:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    weight.zero_()
            model.model.norm.weight.fill_(1)
        extra = {name: torch.ones(size) for name in extra}
        extra["eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"model.layers.3.{name}": tensor for name, tensor in extra.items()}
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(written))
    return Predicting(folder=folder, layers=model, extra=extra)
