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
DEFAULT_PAGE_SIZE = 16
DEFAULT_MEMORY_RATIO = 0.5  # of a CPU; a GPU, which is there for this alone, gives more
DEFAULT_CUDA_GRAPH_MAX_BS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """folder: a checkpoint on disk. None means: measured or derived when the engine is built.

    memory_ratio: share of the device's free memory that weights, activations and KV pool may use;
    None is the device's default.
    num_pages: pages of the KV pool, instead of what memory_ratio gives. page_size: tokens a page.
    max_running: rows of the tables. max_seq_len: caps the model's context. max_prefill_tokens:
    prompt tokens a step. dummy_weight: random weights instead of the checkpoint's.
    cuda_graph_max_bs: rows of the largest CUDA graph, 0 for none; a CPU has none.
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
        for name, value in (
            ("page_size", self.page_size),
            ("num_pages", self.num_pages),
            ("max_running_requests", self.max_running),
            ("max_seq_len", self.max_seq_len),
            ("max_prefill_length", self.max_prefill_tokens),
        ):
            if value is not None:
                check_integer(name, value, 1)
        check_integer("cuda_graph_max_bs", self.cuda_graph_max_bs, 0)
        ratio: Any = self.memory_ratio
        if ratio is not None and not (isinstance(ratio, int | float) and 0 < ratio <= 1):
            raise ConfigError(f"memory_ratio must be a number above 0, up to 1, got {ratio!r}")
        if ratio is not None and self.num_pages is not None:
            raise ConfigError("num_pages and memory_ratio both size the KV cache: give one of them")


def check_integer(name: str, value: Any, low: int) -> None:
    """Raises ConfigError unless the option `name` is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}")
