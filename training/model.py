"""The Qwen3 architecture in plain PyTorch, small enough to read, with Hugging Face tensor names.

It is not transformers' own, so that it compiles to few kernels and trains with a block-diagonal
mask over packed rows. `evaluate.py` runs the checkpoint with transformers, which shows that both
are the same model.

Axes: B rows, T tokens, D hidden, N heads, K key-value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of the model; the defaults make 5.05 M parameters with a vocabulary of 1280."""

    vocab_size: int
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, h = shape.hidden_size, shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(d, shape.num_heads * h, bias=False)
        self.k_proj = nn.Linear(d, shape.num_kv_heads * h, bias=False)
        self.v_proj = nn.Linear(d, shape.num_kv_heads * h, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * h, d, bias=False)
        self.q_norm = nn.RMSNorm(h, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(h, eps=shape.rms_norm_eps)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask_B1TT: Tensor) -> Tensor:
        """mask: True where a query (row) may look at a key (column)."""
        b, t, _ = x_BTD.shape
        h = self.shape.head_dim
        q_BTNH = rotate(self.q_norm(self.q_proj(x_BTD).view(b, t, -1, h)), rope)
        k_BTKH = rotate(self.k_norm(self.k_proj(x_BTD).view(b, t, -1, h)), rope)
        v_BTKH = self.v_proj(x_BTD).view(b, t, -1, h)
        share = self.shape.num_heads // self.shape.num_kv_heads
        k_BTNH = k_BTKH.repeat_interleave(share, dim=2)
        v_BTNH = v_BTKH.repeat_interleave(share, dim=2)
        out_BNTH = F.scaled_dot_product_attention(
            q_BTNH.transpose(1, 2).to(v_BTNH.dtype),
            k_BTNH.transpose(1, 2).to(v_BTNH.dtype),
            v_BTNH.transpose(1, 2),
            attn_mask=mask_B1TT,
        )
        out: Tensor = self.o_proj(out_BNTH.transpose(1, 2).reshape(b, t, -1))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, i = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(d, i, bias=False)
        self.up_proj = nn.Linear(d, i, bias=False)
        self.down_proj = nn.Linear(i, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask_B1TT: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope, mask_B1TT)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the final norm; named `model` in a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Qwen3(nn.Module):
    """A causal language model; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(p, std=0.02 / (2 * shape.num_layers) ** 0.5)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, mask_B1TT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        rope = rope_tables(positions_BT, self.shape)
        x_BTD = self.model.embed_tokens(ids_BT)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, rope, mask_B1TT)
        return F.linear(self.model.norm(x_BTD), self.model.embed_tokens.weight)


def rope_tables(positions_BT: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, H / 2]."""
    half = torch.arange(0, shape.head_dim, 2, device=positions_BT.device)
    rate = shape.rope_theta ** (-half.float() / shape.head_dim)
    angle = (positions_BT.float()[..., None] * rate)[:, :, None, :]
    return angle.cos(), angle.sin()


def rotate(x_BTNH: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pair (i, i + H / 2) by the angle of its position."""
    cos, sin = rope
    a, b = x_BTNH.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def packed_mask(document_BT: Tensor) -> Tensor:
    """[B, 1, T, T], True where key and query are of one document and the key is not later."""
    same = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    return same & torch.ones_like(same[:1, :1]).tril()


def config(shape: Shape, *, eos: int, pad: int) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def save(model: Qwen3, folder: Path, *, eos: int, pad: int) -> None:
    """Writes config.json, generation_config.json and the weights, rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous()
        for name, p in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
    files = {"config.json": config(model.shape, eos=eos, pad=pad)}
    for name, content in {**files, "generation_config.json": generation}.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
