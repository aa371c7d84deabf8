"""The workers of the C++ kernels (`kernel/csrc/threads.h`)."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch import Tensor

from minisgl.kernel.jit import load_library

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def weight() -> Tensor:
    torch.manual_seed(0)
    packed = torch.randn(512, 256).to(BF16)
    load_library().pack(packed, 1)
    return packed


def linear(x: Tensor, weight: Tensor, num_threads: int) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=BF16)
    load_library().packed_linear(x, weight, None, 0, out, num_threads)
    return out


def test_numbers_of_threads_change_from_call_to_call(weight: Tensor) -> None:
    x = torch.randn(9, 256).to(BF16)
    alone = linear(x, weight, 1)
    for turn in range(300):
        assert torch.equal(linear(x, weight, 1 + turn % 5), alone)


def test_callers_have_workers_of_their_own(weight: Tensor) -> None:
    inputs = [torch.randn(5, 256).to(BF16) for _ in range(4)]
    expected = [linear(x, weight, 1) for x in inputs]

    def call(index: int) -> bool:
        results = [linear(inputs[index], weight, 3) for _ in range(100)]
        return all(torch.equal(result, expected[index]) for result in results)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, range(4)))


def test_workers_end_with_their_caller(weight: Tensor) -> None:
    x = torch.randn(5, 256).to(BF16)
    workers: set[int] = set()

    def call() -> None:
        before = thread_ids()
        linear(x, weight, 6)
        workers.update(thread_ids() - before)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(workers) == 5
    end = time.monotonic() + 60
    while workers & thread_ids() and time.monotonic() < end:  # Python's join is a little earlier
        time.sleep(0.01)
    assert not workers & thread_ids()


def thread_ids() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_has_workers_of_its_own(weight: Tensor) -> None:
    """A fork may come while workers of its parent fall asleep and hold their mutex."""
    x = torch.randn(5, 256).to(BF16)
    expected = linear(x, weight, 3)
    for turn in range(20):
        time.sleep(turn / 200_000)
        assert torch.equal(linear(x, weight, 3), expected)
        child = os.fork()
        if child == 0:
            os._exit(not torch.equal(linear(x, weight, 3), expected))
        process = psutil.Process(child)
        try:
            assert process.wait(timeout=60) == 0
        except psutil.TimeoutExpired:
            process.kill()
            raise
