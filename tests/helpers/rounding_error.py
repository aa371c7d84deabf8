"""The error of logits in 16 bits against float32, ours and transformers', for each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from helpers.family_cases import CASES, SIZES
from helpers.model_harness import CPU, Runner, Sequence, load, make_reference, random_ids
from minisgl.attention import create_attention_backend
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops

EACH_FAMILY = sorted({config: name for name, (config, *_) in reversed(CASES.items())}.values())
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
MARGIN = 1.05
DELTA_NET_MARGIN = 1.25
"""Over 12 models of a family, our error is 0.83 to 1.01 of transformers'; over three, at most 1.04,
and 1.22 with delta nets, which divide by lengths that may be small."""


def margin_of(name: str) -> float:
    return DELTA_NET_MARGIN if name.startswith(("qwen3.5", "qwen3-next")) else MARGIN


def every_expert(config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a mixture's config in which each token takes all experts, because two experts that the
    router nearly ties may change places in 16 bits."""
    sizes = {**SIZES, **changes}
    counts = [
        sizes[name] for name in EXPERT_COUNTS if name in sizes and "num_experts_per_tok" in sizes
    ]
    if counts:
        sizes.update(num_experts_per_tok=counts[0], n_group=1, topk_group=1)
    if "top_k_experts" in sizes:
        sizes["top_k_experts"] = sizes["num_experts"]
    return sizes


def errors(
    name: str,
    seed: int,
    folder: Path,
    dtype: torch.dtype,
    *,
    fast: bool = True,
    device: torch.device = CPU,
) -> tuple[float, float]:
    """Return the errors of our logits and of transformers' in 16 bits against transformers' in
    float32 on a CPU: medians over a prompt's positions, because a mixture or a delta net may have
    outliers.

    fast: with the device's kernels, as in the engine.
    """
    config_class, changes, *_ = CASES[name]
    reference = make_reference(config_class(**every_expert(config_class, changes)), seed)
    reference.save_pretrained(folder)
    sequence = Sequence(random_ids(60, seed), 1)
    prompt = torch.tensor([sequence.prompt])
    exact = reference(prompt).logits[0]
    theirs = reference.to(device, dtype)(prompt.to(device)).logits[0].float().cpu()

    ops = create_ops(device) if fast else Ops()
    model = load(folder, dtype, ops=ops, device=device)
    attn = create_attention_backend(
        ("triton" if device.type == "cuda" else "cpu") if fast else "torch",
        ops,
        device,
        dtype=dtype,
        head_dim=model.config.head_dim,
        page_size=4,
        needs=model.spec.attention,
    )
    Runner(model, page_size=4, ops=ops, attn=attn, device=device).generate([sequence], chunk=37)
    ours = torch.cat(sequence.logits)
    assert ours.dtype == torch.float32
    return (
        float((ours.cpu() - exact).abs().median()),
        float((theirs - exact).abs().median()),
    )
