"""Checkpoints with a layer of multi-token prediction, and a reference of what it guesses.

The reference is written from section 2.2 of DeepSeek-V3's report, around transformers' model and
one more of its layers. In Qwen's files the tensors are beside the decoder, and norms multiply by 1
+ their weight.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from helpers.family_cases import DEEPSEEK, GLM4_MOE, SIZES
from helpers.hybrid_cases import DELTA, EXPERTS, FULL, LINEAR
from helpers.model_harness import make_reference

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "glm4-moe": (Glm4MoeConfig, {**GLM4_MOE, "use_qk_norm": True, "n_shared_experts": 2}),
    "deepseek-v3": (DeepseekV3Config, DEEPSEEK),
}

HYBRID = {**DELTA, "max_position_embeddings": 512, "layer_types": [LINEAR, LINEAR, FULL, FULL]}
HYBRIDS: dict[str, tuple[type, dict[str, Any]]] = {
    # The model's last layer is recurrent; that of multi-token prediction has attention.
    "qwen3.5": (
        Qwen3_5TextConfig,
        {**HYBRID, "layer_types": [LINEAR, FULL, LINEAR, FULL], "tie_word_embeddings": True},
    ),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, {**HYBRID, **EXPERTS, "linear_key_head_dim": 16}),
    "qwen3-next": (Qwen3NextConfig, {**HYBRID, **EXPERTS}),
}
QWEN_NAMES = {
    "model.layers.3.enorm": "mtp.pre_fc_norm_embedding",
    "model.layers.3.hnorm": "mtp.pre_fc_norm_hidden",
    "model.layers.3.eh_proj": "mtp.fc",
    "model.layers.3.shared_head.norm": "mtp.norm",
    "model.layers.3.": "mtp.layers.0.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicting:
    """layers: the model with one layer more, which is that of multi-token prediction. extra: its
    other tensors, by the end of their names. one: what norms add to their weights."""

    folder: Path
    layers: PreTrainedModel
    extra: dict[str, Tensor]
    one: float = 0.0

    @torch.no_grad()
    def guess_logits(self, ids: list[int]) -> Tensor:
        """Return the logits of the token after the next one at each position but the last."""
        model = self.layers.model
        *first, last = model.layers
        model.layers = torch.nn.ModuleList(first)
        states = model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
        model.layers = torch.nn.ModuleList([*first, last])
        tokens = model.embed_tokens(torch.tensor([ids[1:]]))
        return self.guess_from(tokens, states)

    @torch.no_grad()
    def guess_from(self, tokens: Tensor, states: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens: the embeddings of the next tokens, [1, T, D]. states: the model's, [1, T, D]."""
        model, last = self.layers.model, self.layers.model.layers[-1]
        both = self._normed(tokens, "enorm"), self._normed(states, "hnorm")
        x = torch.cat(both, dim=-1) @ self.extra["eh_proj.weight"].T
        count = x.shape[1]
        if positions is None:
            positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotation = model.rotary_emb(x, positions)
        x = last(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self.layers.lm_head(self._normed(x, "shared_head.norm"))[0]

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight, eps = self.one + self.extra[f"{name}.weight"], self.layers.config.rms_norm_eps
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Return the model's own logits."""
        *first, last = self.layers.model.layers
        self.layers.model.layers = torch.nn.ModuleList(first)
        logits: Tensor = self.layers(torch.tensor([ids]), use_cache=False).logits[0]
        self.layers.model.layers = torch.nn.ModuleList([*first, last])
        return logits


def with_stacked_experts(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The layer's experts as Qwen3.6's files have them; those of the model stay apart."""
    prefix = "mtp.layers.0.mlp.experts"

    def stacked(*kinds: str) -> Tensor:
        names = [[f"{prefix}.{i}.{kind}_proj.weight" for kind in kinds] for i in range(count)]
        return torch.stack([torch.cat([tensors[name] for name in each]) for each in names])

    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    both = {"gate_up_proj": stacked("gate", "up"), "down_proj": stacked("down")}
    return kept | {f"{prefix}.{name}": tensor for name, tensor in both.items()}


ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
"""Ends of the names of the matrices that end a layer's two halves."""


def save_predicting(folder: Path, case: str, *, is_certain: bool = False) -> Predicting:
    """Write a checkpoint with random weights. is_certain: its next token depends on the last one
    only, and the layer knows it, so that each guess is right."""
    kind, values = {**CASES, **HYBRIDS}[case]
    one = float(case in HYBRIDS)
    config = kind(**SIZES | values | {"num_hidden_layers": 4})
    model = make_reference(config)
    size = config.hidden_size
    extra = {
        "eh_proj.weight": torch.randn(size, 2 * size) * (2 * size) ** -0.5,
        **{
            f"{name}.weight": 1 - one + 0.3 * torch.randn(size)
            for name in ("enorm", "hnorm", "shared_head.norm")
        },
    }
    if is_certain:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(ENDS):
                    weight.zero_()
            model.model.norm.weight.fill_(1 - one)
        extra = {name: torch.full((size,), 1 - one) for name in extra}
        extra["eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"model.layers.3.{name}": tensor for name, tensor in extra.items()}
    written = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    if one:
        for ours, theirs in QWEN_NAMES.items():
            tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
        written["layer_types"] = written["layer_types"][:3]
        if case == "qwen3-next":
            tensors = with_stacked_experts(tensors, config.num_experts)
    else:
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        written["num_nextn_predict_layers"] = 1
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written))
    return Predicting(folder=folder, layers=model, extra=extra, one=one)
