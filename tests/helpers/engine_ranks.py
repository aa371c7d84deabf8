"""Engines on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisgl.engine import Engine, EngineConfig


@contextmanager
def engines(folder: Path, store: Path, size: int, **options: Any) -> Iterator[list[Engine]]:
    """Yield the engines of all ranks, started side by side."""

    def start(rank: int) -> Engine:
        settings: dict[str, Any] = {
            "device": "cpu",
            "page_size": 4,
            "dtype": "float32",
            "num_pages": 96,
            "max_running_requests": 8,
            "max_prefill_length": 16,
        }
        return Engine(
            EngineConfig(
                model=str(folder), tp=size, rank=rank, store=f"file://{store}",
                **(settings | options),
            )
        )  # fmt: skip

    with ThreadPoolExecutor(size) as pool:
        started = list(pool.map(start, range(size)))
    yield started
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(Engine.close, started))
