"""The least time in which a card can compute a workload, by its arithmetic and its bytes.

Prefill is bound by arithmetic; decode by arithmetic or memory traffic, whichever is more. Requests
decode as one batch as far as they fit: each step reads the weights once, each output token its
context once.

    floor = prefill FLOPs / rate + max(decode bytes / bandwidth, decode FLOPs / rate)

The bound is for an engine that computes prompts in steps of their own and keeps what it has
computed on the card. Steps with both prompt and output tokens can take less time, as prompts'
arithmetic hides reads. Computing keys again costs FLOPs, and moving them to the host its link.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from minisgl.errors import ConfigError

H200_FLOPS = 790e12
"""bf16 products of 8,192 cubed on random data, one H200."""
H200_BANDWIDTH = 4.3e12
"""Bytes a second, between the measured copy (4.25) and read (4.38) rates of one H200."""
H200_MEMORY = 150.1e9
"""Bytes of one H200: 139.8 GiB."""


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

    attention_layers: the number of layers that read the whole context; None for all. mixer_params:
    all weights of the other layers' mixers, which are linear attention or see the last `window`
    tokens. window_kv_bytes: a token's keys and values in all layers with windows. window_flops: of
    a query and a key there. q_heads_factor: 2 if attention has an output gate. state_bytes: a
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
    window: int = 0
    window_kv_bytes: int = 0
    window_flops: float = 0
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

    def held_bytes(self, num_tokens: int) -> int:
        """Return the least bytes that a request holds after so many tokens of its own: keys and
        values, those that the next token sees in layers with windows, and states."""
        in_window = min(num_tokens, self.window - 1) if self.window else 0
        return self.kv_bytes * num_tokens + self.window_kv_bytes * in_window + self.state_bytes

    def attention_flops(self, num_scores: float, in_windows: float) -> float:
        """Return the FLOPs of so many pairs of a query and a key in a layer and head that reads the
        whole context, and in one with a window, in all layers and heads."""
        whole = 4.0 * num_scores * self.kv_layers * self.num_heads * self.head_dim
        return whole + in_windows * self.window_flops

    def seen(self, start: int, end: int) -> float:
        """Return how many keys the queries from position `start` to `end` see in a window."""

        def until(position: int) -> float:
            inside = min(position, self.window)
            return inside**2 / 2 + (position - inside) * self.window

        return until(end) - until(start)


def _held_bytes(shape: Shape, requests: Sequence[tuple[int, int]], shared: int) -> list[int]:
    """Return, for each output token, the bytes that its request holds before that token's step. The
    first token comes from the prompt's step, before which the request holds nothing."""
    return [
        shape.held_bytes(prompt - shared + i - 1) if i else 0
        for prompt, output in requests
        for i in range(output)
    ]


def _room(shape: Shape, shared: int, memory: float) -> float:
    """Return the bytes that all weights and the common prefix leave for requests, at most:
    embeddings that are not the head's are left out."""
    weights = shape.read_bytes(math.inf) + shape.head_params * shape.itemsize
    return memory - weights - shape.kv_bytes * shared


def rows_at_once(
    shape: Shape, requests: Sequence[tuple[int, int]], *, shared: int = 0, memory: float
) -> int:
    """Return how many of the requests fit at once, if each holds the mean over all tokens."""
    held = _held_bytes(shape, requests, shared)
    fitting = _room(shape, shared, memory) * len(held) / max(sum(held), 1)
    return min(int(fitting), len(requests))


def step_rows(
    shape: Shape,
    requests: Sequence[tuple[int, int]],
    *,
    shared: int = 0,
    memory: float = math.inf,
) -> list[int]:
    """Return how many rows each decode step has, in steps that read the fewest bytes of weights.

    memory: bytes. Raises ConfigError if the weights and one request take more.
    """
    held = sorted(_held_bytes(shape, requests, shared))
    room = _room(shape, shared, memory)
    if room < held[-1]:
        raise ConfigError(
            f"a request holds {held[-1] / 1e9:.1f} GB, and the weights leave {room / 1e9:.1f} of "
            f"{memory / 1e9:.1f} GB"
        )
    # Any k steps compute at most k tokens of a request, and their rows hold at most k * room bytes.
    # So they have no more tokens than the smallest sizes with this sum. A step's bytes are concave
    # in its rows, so all steps read the fewest bytes if, for each k, the first k steps have all the
    # tokens that any k steps can have.
    sums = list(accumulate(held))
    rows: list[int] = []
    done = as_one_batch = 0
    while done < len(held):
        as_one_batch += sum(output > len(rows) for _, output in requests)
        most = min(as_one_batch, bisect_right(sums, (len(rows) + 1) * room))
        rows.append(most - done)
        done = most
    return rows


def floor_s(
    shape: Shape,
    requests: Sequence[tuple[int, int]],
    *,
    shared: int = 0,
    cards: int = 1,
    memory: float | None = None,
) -> float:
    """Return the least seconds for (prompt, output) lengths.

    shared: the length of the common prefix, which is computed once and read once a step. cards:
    H200s, whose communication takes no time. memory: bytes of a card; with None, all requests fit.
    """
    own = sum(prompt - shared for prompt, _ in requests)
    scores = shared**2 / 2 + sum(
        (prompt - shared) * (shared + (prompt - shared) / 2) for prompt, _ in requests
    )
    in_windows = shape.seen(0, shared) + sum(shape.seen(shared, prompt) for prompt, _ in requests)
    prefill = 2.0 * shape.token_params * (own + shared) / shape.flops_factor
    prefill += 2.0 * shape.head_params * len(requests) + shape.attention_flops(scores, in_windows)

    tokens = sum(output for _, output in requests)
    contexts = sum(output * (prompt + output / 2) for prompt, output in requests)
    # What a window sees of the common prefix may be read once for all rows, and counts as 0.
    in_windows = sum(
        shape.seen(prompt - shared, prompt - shared + output) for prompt, output in requests
    )
    rows = step_rows(
        shape, requests, shared=shared, memory=math.inf if memory is None else memory * cards
    )
    head_bytes = shape.head_params * shape.itemsize
    weights = sum(shape.read_bytes(count) + head_bytes for count in rows)
    read = weights + shape.kv_bytes * (contexts - shared * tokens + shared * len(rows))
    read += shape.window_kv_bytes * in_windows + shape.state_bytes * tokens
    decode = 2.0 * (shape.token_params / shape.flops_factor + shape.head_params) * tokens
    decode += shape.attention_flops(contexts, in_windows)
    flops, bandwidth = H200_FLOPS * cards, H200_BANDWIDTH * cards
    return prefill / flops + max(read / bandwidth, decode / flops)


def floor_fields(
    shape: Shape,
    requests: Sequence[tuple[int, int]],
    seconds: float,
    *,
    shared: int = 0,
    cards: int = 1,
    memory: float,
) -> dict[str, float]:
    """Return a row's fields: floor_s, the share of_floor of the measured seconds, and rows_at_once
    if not all requests fit at once. memory: bytes of a card."""
    floor = floor_s(shape, requests, shared=shared, cards=cards, memory=memory)
    fields = {"floor_s": round(floor, 4), "of_floor": round(floor / seconds, 3)}
    rows = rows_at_once(shape, requests, shared=shared, memory=memory * cards)
    return fields | ({"rows_at_once": rows} if rows < len(requests) else {})
