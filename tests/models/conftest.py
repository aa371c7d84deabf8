"""One thread: the models are tiny, and threads that spin for each other on busy cores made this
folder take 254 s instead of 14 s (load 8 on 2 cores)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
