"""The time below which no engine computes a workload on a card: its arithmetic and its bytes.

Prefill is bound by arithmetic; decode by the larger of arithmetic and memory traffic, as if all
requests ran as one batch: each step reads the weights once, each output token its context once.

    floor = prefill FLOPs / rate + max(decode bytes / bandwidth, decode FLOPs / rate)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

H200_FLOPS = 790e12
"""bf16 products of 8,192 cubed on random data, one H200."""
H200_BANDWIDTH = 4.3e12
"""Bytes a second, between the measured copy (4.25) and read (4.38) rates of one H200."""


def touched_experts(num_experts: int, top_k: int, num_tokens: float) -> float:
    """How many of E experts a batch of T tokens is expected to touch, each choosing K evenly:
    E * (1 - (1 - K / E)^T)."""
    return num_experts * (1.0 - float((1 - top_k / num_experts) ** num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a dense decoder. Sizes as in config.json."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    itemsize: int = 2

    @property
    def block_params(self) -> int:
        """Of all blocks' matrices."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def head_params(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def attention_flops(self, num_scores: float) -> float:
        """Of `num_scores` pairs of a query and a key, in all layers and heads."""
        return 4.0 * num_scores * self.num_layers * self.num_heads * self.head_dim


def floor_s(
    shape: Shape,
    requests: Sequence[tuple[int, int]],
    *,
    shared: int = 0,
    flops: float = H200_FLOPS,
    bandwidth: float = H200_BANDWIDTH,
) -> float:
    """Seconds for (prompt, output) lengths; the first `shared` prompt tokens are equal in all,
    computed once, and read once a step."""
    own = sum(prompt - shared for prompt, _ in requests)
    scores = shared**2 / 2 + sum(
        (prompt - shared) * (shared + (prompt - shared) / 2) for prompt, _ in requests
    )
    prefill = 2.0 * shape.block_params * (own + shared) + 2.0 * shape.head_params * len(requests)
    prefill += shape.attention_flops(scores)

    steps = max(output for _, output in requests)
    tokens = sum(output for _, output in requests)
    contexts = sum(output * (prompt + output / 2) for prompt, output in requests)
    weights = (shape.block_params + shape.head_params) * shape.itemsize
    own_contexts = contexts - shared * tokens
    read = steps * weights + shape.kv_bytes * (own_contexts + shared * steps)
    decode = 2.0 * (shape.block_params + shape.head_params) * tokens
    decode += shape.attention_flops(contexts)
    return prefill / flops + max(read / bandwidth, decode / flops)
