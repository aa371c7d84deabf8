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


def product_floor_s(rows: int, weights: int, itemsize: int = 2) -> float:
    """Of rows times a matrix of so many weights, which are read once; of an H200."""
    return max(weights * itemsize / H200_BANDWIDTH, 2.0 * rows * weights / H200_FLOPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a decoder. Sizes as in config.json; with experts, each token takes top_k of num_experts,
    and intermediate_size is an expert's."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    top_k: int = 0
    itemsize: int = 2

    def block_params(self, num_experts: float) -> float:
        """Of all blocks' matrices, with so many MLPs each (1 where there are no experts)."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        mlps = num_experts * 3 * self.intermediate_size + self.num_experts
        return self.num_layers * self.hidden_size * (heads + mlps)

    @property
    def token_params(self) -> float:
        """Of the blocks, what a token is multiplied with."""
        return self.block_params(self.top_k or 1)

    def read_params(self, num_tokens: float) -> float:
        """Of the blocks, what a step of so many tokens reads, routed evenly."""
        if not self.num_experts:
            return self.block_params(1)
        return self.block_params(touched_experts(self.num_experts, self.top_k, num_tokens))

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
    prefill = 2.0 * shape.token_params * (own + shared) + 2.0 * shape.head_params * len(requests)
    prefill += shape.attention_flops(scores)

    steps = max(output for _, output in requests)
    tokens = sum(output for _, output in requests)
    contexts = sum(output * (prompt + output / 2) for prompt, output in requests)
    # As if all requests ran as one batch: step i has those whose output is longer.
    running = (sum(output > i for _, output in requests) for i in range(steps))
    weights = sum(shape.read_params(rows) + shape.head_params for rows in running) * shape.itemsize
    own_contexts = contexts - shared * tokens
    read = weights + shape.kv_bytes * (own_contexts + shared * steps)
    decode = 2.0 * (shape.token_params + shape.head_params) * tokens
    decode += shape.attention_flops(contexts)
    return prefill / flops + max(read / bandwidth, decode / flops)
