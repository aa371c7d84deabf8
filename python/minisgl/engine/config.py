"""The engine's settings, as the user gave them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

from minisgl.distributed import DistributedInfo
from minisgl.errors import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]

ALONE = DistributedInfo(0, 1)
MAX_PAGE_SIZE = 1024  # as --page-size says
MIN_SEQ_LEN = 2  # a prompt's token and one of the answer
DEFAULT_PAGE_SIZE = 16
DEFAULT_MEMORY_RATIO = 0.5  # of a CPU; a GPU, which is there for this alone, gives more
DEFAULT_CUDA_GRAPH_MAX_BS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What is None is measured or derived when the engine is built.

    folder: a checkpoint on disk.
    memory_ratio: share of the device's free memory that weights, activations and KV pool may use;
    None is the device's default.
    num_pages: pages of the KV pool, instead of what memory_ratio gives. page_size: tokens a page.
    max_running: rows of the tables. max_seq_len: caps the model's context. max_prefill_tokens:
    prompt tokens a step. dummy_weight: random weights instead of the checkpoint's.
    cuda_graph_max_bs: decode rows of the largest CUDA graph, 0 for none; a CPU has none.
    expert_parallel: ranks share the experts of a mixture, not each expert's columns.
    ranks: which part of the model is computed here. num_local: how many of the ranks this machine
    has. store: where they meet (`minisgl.distributed.create_communicator`). pynccl: may be used.
    """

    folder: Path
    dtype: DTypeName = "auto"
    device: DeviceName = "auto"
    attn: str = "auto"
    page_size: int = DEFAULT_PAGE_SIZE
    num_pages: int | None = None
    memory_ratio: float | None = None
    max_running: int = 256
    max_seq_len: int | None = None
    max_prefill_tokens: int | None = None
    dummy_weight: bool = False
    cuda_graph_max_bs: int = DEFAULT_CUDA_GRAPH_MAX_BS
    expert_parallel: bool = False
    ranks: DistributedInfo = ALONE
    num_local: int = 1
    store: str = ""
    pynccl: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DTypeName):
            raise ConfigError(
                f"dtype must be one of {', '.join(get_args(DTypeName))}, got {self.dtype!r}"
            )
        if not isinstance(self.attn, str):
            raise ConfigError(f"attn must be the name of a backend, got {self.attn!r}")
        check_integer("page_size", self.page_size, 1, MAX_PAGE_SIZE)
        check_integer("max_running_requests", self.max_running, 1)
        for name, value, low in (
            ("num_pages", self.num_pages, 1),
            ("max_seq_len", self.max_seq_len, MIN_SEQ_LEN),
            ("max_prefill_length", self.max_prefill_tokens, 1),
        ):
            if value is not None:
                check_integer(name, value, low)
        check_integer("cuda_graph_max_bs", self.cuda_graph_max_bs, 0)
        ratio: Any = self.memory_ratio
        is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if ratio is not None and not (is_number and 0 < ratio <= 1):
            raise ConfigError(f"memory_ratio must be a number above 0, up to 1, got {ratio!r}")
        if ratio is not None and self.num_pages is not None:
            raise ConfigError("num_pages and memory_ratio both size the KV cache: give one of them")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises ConfigError unless the option `name` is a whole number from `low` to `high`."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be a whole number {bounds}, got {value!r}")
