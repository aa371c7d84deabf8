"""The least time in which a card can compute a workload, by its arithmetic and its bytes.

Prefill is bound by arithmetic; decode by arithmetic or memory traffic, whichever is more. All
requests count as one batch: each step reads the weights once, each output token its context once.

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
    """Return the expected number of experts that T tokens touch, if each chooses K of E evenly:
    E * (1 - (1 - K / E)^T)."""
    return num_experts * (1.0 - float((1 - top_k / num_experts) ** num_tokens))


def gemm_floor_s(rows: int, weights: int, itemsize: int = 2) -> float:
    """Return the least seconds of a GEMM on an H200: rows times a matrix of so many weights."""
    return max(weights * itemsize / H200_BANDWIDTH, 2.0 * rows * weights / H200_FLOPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder's sizes, as config.json has them. With experts, each token takes top_k of
    num_experts, and intermediate_size is one expert's.

    attention_layers: the number of layers that read the whole context; None for all. The windows of
    other layers are left out, so the floor is a lower bound. q_heads_factor: 2 if attention has an
    output gate. mixer_params: all weights of the linear-attention layers' mixers. state_bytes: a
    request's recurrent states, read for each token. shared_size: intermediate size of the expert
    that every token takes. weight_bytes, expert_bytes: bytes per weight; the LM head has
    `itemsize`. kv_itemsize: bytes of a number of the KV cache. flops_factor: the rate of the GEMMs
    over bf16's.
    """

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
    kv_itemsize: int = 2
    attention_layers: int | None = None
    q_heads_factor: int = 1
    mixer_params: int = 0
    state_bytes: int = 0
    shared_size: int = 0
    weight_bytes: float = 2
    expert_bytes: float = 2
    flops_factor: float = 1.0

    @property
    def kv_layers(self) -> int:
        return self.num_layers if self.attention_layers is None else self.attention_layers

    @property
    def dense_params(self) -> float:
        """Weights of all blocks, without routed experts."""
        q_and_o = (1 + self.q_heads_factor) * self.num_heads
        attention = self.kv_layers * (q_and_o + 2 * self.num_kv_heads) * self.head_dim
        mlps = 3 * (self.shared_size if self.num_experts else self.intermediate_size)
        return self.mixer_params + self.hidden_size * (
            attention + self.num_layers * (mlps + self.num_experts)
        )

    def expert_params(self, num_experts: float) -> float:
        """Return the weights of `num_experts` experts in each of the blocks."""
        return self.num_layers * self.hidden_size * num_experts * 3 * self.intermediate_size

    @property
    def token_params(self) -> float:
        """Weights by which one token is multiplied, in all blocks."""
        return self.dense_params + self.expert_params(self.top_k)

    def read_bytes(self, num_tokens: float) -> float:
        """Return the bytes of the blocks' weights that a step reads, with tokens routed evenly."""
        read = self.dense_params * self.weight_bytes
        if self.num_experts:
            touched = touched_experts(self.num_experts, self.top_k, num_tokens)
            read += self.expert_params(touched) * self.expert_bytes
        return read

    @property
    def head_params(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_layers * self.num_kv_heads * self.head_dim * self.kv_itemsize

    def attention_flops(self, num_scores: float) -> float:
        """Return the FLOPs of `num_scores` pairs of a query and a key, in all layers and heads."""
        return 4.0 * num_scores * self.kv_layers * self.num_heads * self.head_dim


def floor_s(
    shape: Shape,
    requests: Sequence[tuple[int, int]],
    *,
    shared: int = 0,
    flops: float = H200_FLOPS,
    bandwidth: float = H200_BANDWIDTH,
) -> float:
    """Return the least seconds for (prompt, output) lengths.

    shared: the length of the common prefix, which is computed once and read once a step.
    """
    own = sum(prompt - shared for prompt, _ in requests)
    scores = shared**2 / 2 + sum(
        (prompt - shared) * (shared + (prompt - shared) / 2) for prompt, _ in requests
    )
    prefill = 2.0 * shape.token_params * (own + shared) / shape.flops_factor
    prefill += 2.0 * shape.head_params * len(requests) + shape.attention_flops(scores)

    steps = max(output for _, output in requests)
    tokens = sum(output for _, output in requests)
    contexts = sum(output * (prompt + output / 2) for prompt, output in requests)
    # As if all requests ran as one batch: step i has the requests whose output is longer than i.
    running = (sum(output > i for _, output in requests) for i in range(steps))
    head_bytes = shape.head_params * shape.itemsize
    weights = sum(shape.read_bytes(rows) + head_bytes for rows in running)
    own_contexts = contexts - shared * tokens
    read = weights + shape.kv_bytes * (own_contexts + shared * steps) + shape.state_bytes * tokens
    decode = 2.0 * (shape.token_params / shape.flops_factor + shape.head_params) * tokens
    decode += shape.attention_flops(contexts)
    return prefill / flops + max(read / bandwidth, decode / flops)
