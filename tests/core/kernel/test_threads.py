"""The workers of the C++ kernels (`kernel/csrc/threads.h`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import psutil
import pytest
import torch
from torch import Tensor

from minisgl.kernel.jit import load_library

BF16 = torch.bfloat16
library = cache(load_library)  # each call of it reads the library's file


@pytest.fixture(scope="module")
def weight() -> Tensor:
    torch.manual_seed(0)
    packed = torch.randn(512, 256).to(BF16)
    library().pack(packed, 1)
    return packed


def linear(x: Tensor, weight: Tensor, num_threads: int) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=BF16)
    library().packed_linear(x, weight, None, 0, out, num_threads)
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


LITTLE_MEMORY = """
import resource, torch
from minisgl.kernel.jit import load_library

def take_at_most(num_bytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))

def linear(num_threads):
    out = torch.full((9, 512), torch.nan, dtype=torch.bfloat16)
    library.packed_linear(x, weight, None, 0, out, num_threads)
    return out

torch.manual_seed(0)
library = load_library()
x, weight = torch.randn(9, 256).bfloat16(), torch.randn(512, 256).bfloat16()
alone = linear(1)
take_at_most(1 << 20)  # less than the stack of a thread
assert torch.equal(linear(5), alone)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
from minisgl.engine.cpu import CpuDevice

device = CpuDevice()
panels = torch.zeros(32, 1 << 17, dtype=torch.bfloat16)  # to pack one takes 4 MiB
assert torch.equal(linear(2), alone)
take_at_most(6 << 20)  # for one of two threads
failed = 0
for _ in range(10_000):
    try:
        library.pack(panels, 2)
    except RuntimeError as error:
        assert device.is_out_of_memory(error)
        failed += 1
        if failed == 5:
            break
assert failed == 5
assert torch.equal(linear(2), alone)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux limits the memory of a process")
def test_what_the_system_refuses_does_not_end_the_process() -> None:
    """One test for one import of torch: a thread, then memory in a thread."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000"}  # malloc then keeps no memory
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
