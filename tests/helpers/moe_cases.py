"""Random mixtures, and their outputs in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MixtralConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from minisgl.kernel.ops import Activation, Ops
from minisgl.moe import ClampedGate, Experts, SquaredRelu
from minisgl.quantization import PlainWeight

ACTIVATIONS: dict[str, tuple[Activation | ClampedGate | SquaredRelu, bool]] = {
    "gpt-oss": (ClampedGate(1.702, 0.8), True),
    "gelu": ("gelu_tanh", False),  # Gemma 4
    "squared": (SquaredRelu(), False),  # Nemotron 3
}
"""Activations beside SiLU, and whether the experts have biases."""
# Of the largest value. In turn gate and up, the activation, their product, each expert's result and
# the sum are rounded: five halves of a unit in the last place add up to less than this.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 5 * 2**-9, torch.float16: 5 * 2**-12}


def make_case(
    tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    first: int = 0,
    held: int | None = None,
    *,
    renormalise: bool = True,
    activation: Activation | ClampedGate | SquaredRelu = "silu",
    bias: bool = False,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Experts]:
    """Return x, router logits and experts."""
    generator = torch.Generator(device).manual_seed(tokens * 31 + num_experts)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    held = num_experts if held is None else held
    rows = inner if isinstance(activation, SquaredRelu) else 2 * inner
    experts = Experts(
        gate_up=PlainWeight.of(Ops(), (random(held, rows, hidden) * hidden**-0.5).to(dtype)),
        down=PlainWeight.of(Ops(), (random(held, hidden, inner) * inner**-0.5).to(dtype)),
        count=held,
        first=first,
        total=num_experts,
        top_k=top_k,
        renormalise=renormalise,
        activation=activation,
        gate_up_bias=random(held, 2 * inner).to(dtype) if bias else None,
        down_bias=random(held, hidden).to(dtype) if bias else None,
    )
    return random(tokens, hidden).to(dtype), random(tokens, num_experts).to(dtype), experts


def exact(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
    """Return the weighted sums of the held experts, in float64."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64, device=x_TD.device)
    for index, (gate_up, down) in enumerate(
        zip(experts.gate_up_LGD, experts.down_LDF, strict=True)
    ):
        chosen = (ids_TK == experts.first + index) * weights_TK.double()
        tokens = chosen.any(-1).nonzero()[:, 0]
        gate_up_MG = x_TD[tokens].double() @ gate_up.double().T
        if experts.gate_up_bias is not None:
            gate_up_MG += experts.gate_up_bias[index].double()
        y = _activated(gate_up_MG, experts) @ down.double().T
        if experts.down_bias is not None:
            y += experts.down_bias[index].double()
        out_TD[tokens] += y * chosen[tokens].sum(-1, keepdim=True)
    return out_TD


def _activated(gate_up: Tensor, experts: Experts) -> Tensor:
    if experts.is_squared:
        return F.relu(gate_up) ** 2
    gate, up = gate_up.chunk(2, dim=-1)
    if experts.activation == "silu":
        return F.silu(gate) * up
    if experts.activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    # transformers', whose gate and up alternate.
    return GptOssExperts._apply_gate(experts.activation, torch.stack((gate, up), -1).flatten(-2))


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A model of 3 layers with `family`'s mixture."""
    sizes: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if family == "mixtral":
        return MixtralConfig(**{**sizes, "num_local_experts": 5, **changes})
    sizes |= {"num_experts": 9, "moe_intermediate_size": 24}
    if family == "qwen2":  # whose weights do not add up to 1
        return Qwen2MoeConfig(**{**sizes, "shared_expert_intermediate_size": 56, **changes})
    sizes |= {"head_dim": 20, "mlp_only_layers": [1], "norm_topk_prob": True}
    return Qwen3MoeConfig(**{**sizes, **changes})
