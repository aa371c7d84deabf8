"""Random blocks of llama.cpp's formats, and the values that the package gguf reads from them."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from minisgl_zoo.gguf.header import TYPE_OF

HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
}  # fmt: skip
"""Where a block has its scale and its step, if not at 0 alone."""


def draw(kind: str, seed: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The blocks of a random matrix, and its values in float32."""
    rng = np.random.default_rng(seed)
    about = TYPE_OF[kind]
    blocks = rng.integers(
        0, 256, (*shape[:-1], shape[-1] // about.block, about.num_bytes), dtype=np.uint8
    )
    for at in HALVES.get(kind, (0,)):
        factors = (rng.random((*blocks.shape[:-1], 1)) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = factors.view(np.uint8)
    rows = blocks.reshape(*shape[:-1], -1)
    values = gguf.quants.dequantize(rows, Kind[kind]).astype(np.float32)
    return torch.from_numpy(rows), torch.from_numpy(values)
