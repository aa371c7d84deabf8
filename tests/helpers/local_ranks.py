"""Ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from helpers.family_cases import MOE
from minisgl.distributed import (
    DistributedCommunicator,
    DistributedInfo,
)


class ThreadRank(DistributedCommunicator):
    """One of the ranks that share `slots` and `barrier`."""

    def __init__(self, rank: int, slots: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(DistributedInfo(rank, len(slots)))
        self.slots, self.barrier = slots, barrier

    def _exchange(
        self, x: torch.Tensor, join: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        self.slots[self.rank] = x
        self.barrier.wait(timeout=30)
        result = join(self.slots)
        self.barrier.wait(timeout=30)
        return result

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange(x, lambda slots: torch.stack(slots).sum(0))

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._exchange(x, lambda slots: torch.cat(slots, dim))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._exchange(x, lambda slots: slots[source].clone())

    def exchange(self, x_SV: torch.Tensor) -> torch.Tensor:
        rows = self.info.share(len(x_SV))
        return self._exchange(x_SV, lambda slots: torch.cat(slots, 1)[rows.start : rows.stop])

    def all_min(self, value: int) -> int:
        return int(self._exchange(torch.tensor(value), lambda slots: torch.stack(slots).min()))


def ranks(size: int, kind: type[ThreadRank] = ThreadRank) -> list[ThreadRank]:
    slots, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    return [kind(rank, slots, barrier) for rank in range(size)]


# name -> (config class, changes, ranks): sizes that do not divide. Every family runs on two ranks.
UNEVEN: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], int]] = {
    "3-kv-heads-on-2": (
        LlamaConfig,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
        2,
    ),
    "8-kv-heads-on-3": (
        LlamaConfig,
        {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8},
        3,
    ),
    "14-heads-on-4": (Qwen2Config, {"num_attention_heads": 14, "head_dim": 8}, 4),
    "14-heads-on-3": (Qwen3Config, {"num_attention_heads": 14, "head_dim": 8}, 3),
    "one-kv-head-tied": (
        Qwen3Config,
        {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
        4,
    ),
    "odd-width-biases": (
        LlamaConfig,
        {"intermediate_size": 73, "attention_bias": True, "mlp_bias": True},
        3,
    ),
    "14-heads-moe-on-3": (
        Qwen3MoeConfig,
        {**MOE, "num_attention_heads": 14, "head_dim": 8, "moe_intermediate_size": 25},
        3,
    ),
    "mixtral-on-4": (MixtralConfig, {"num_local_experts": 3, "intermediate_size": 70}, 4),
    "empty-vocabulary-share": (LlamaConfig, {"vocab_size": 33, "tie_word_embeddings": True}, 4),
}
