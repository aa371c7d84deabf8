"""One thread for everybody's arithmetic, and no GPU but in `tests/gpu`.

The tests run side by side on few cores and compute on tiny tensors: with more threads each, the
threads wait for each other most of the time (18 times slower was measured). Tests that name no
device are about the CPU, also on a machine with GPUs.
"""

import os
from collections.abc import Generator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch

import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around a test and its fixtures, for this process and for those that it starts."""
    if GPU_TESTS in item.path.parents:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return (yield)
