"""Weights in 4 and 8 bits with groups, packed as AWQ, GPTQ and compressed-tensors do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.quantised import Quantise

GROUP = 32


def pack(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers [n, m] -> int32 [n, m * bits / 32]. order: the column of each place."""
    each = 32 // bits
    order = order or tuple(range(each))
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each))
    packed = torch.zeros(len(padded), padded.shape[1] // each, dtype=torch.long)
    for place, column in enumerate(order):
        packed |= padded[:, column::each] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def grouped(
    spelling: str, bits: int = 4, *, group: int = GROUP, zero: bool = True, act_order: bool = False
) -> Quantise:
    """group: 0 for whole rows."""
    most = 2**bits - 1

    def quantised(module: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        height, width = tensor.shape
        size = group or width
        index = torch.arange(width) // size
        if act_order:
            seed = torch.Generator().manual_seed(sum(map(ord, module)))
            index = index[torch.randperm(width, generator=seed)]
        scale = torch.empty(height, width // size)
        zeros = torch.empty_like(scale)
        for g in range(width // size):
            columns = tensor[:, index == g]
            low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
            scale[:, g] = (high - low) / most if zero else columns.abs().amax(1) * 2 / most
            zeros[:, g] = (-low / scale[:, g]).round() if zero else (most + 1) // 2
        scale = scale.half().float()
        if spelling == "gptq":  # version 1 cannot hold a zero point of 0 in every packer
            zeros = zeros.clamp(1, most)
        numbers = (tensor / scale[:, index] + zeros[:, index]).round().clamp(0, most)
        dequantised = (numbers - zeros[:, index]) * scale[:, index]
        if spelling == "compressed-tensors":
            tensors = {
                "weight_packed": pack(numbers, bits),
                "weight_scale": scale.half(),
                "weight_shape": torch.tensor([height, width]),
            }
            if zero:
                tensors["weight_zero_point"] = pack(zeros.T, bits).T
            if act_order:
                tensors["weight_g_idx"] = index.int()
            return tensors, dequantised
        if spelling == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            return {
                "qweight": pack(numbers.T, 4, order),
                "qzeros": pack(zeros.T, 4, order),
                "scales": scale.T.half(),
            }, dequantised
        stored = zeros - 1 if spelling == "gptq" else zeros
        return {
            "qweight": pack(numbers, bits).T,
            "qzeros": pack(stored.T, bits),
            "scales": scale.T.half(),
            "g_idx": index.int(),
        }, dequantised

    return quantised


def compressed(**weights: Any) -> dict[str, Any]:
    values = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": values}},
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "data_type": "int",
    "bits": 4,
    "group_size": GROUP,
    "sym": False,
    "packing_format": "auto_round:auto_gptq",
    "block_name_to_quantize": "model.layers",
}
