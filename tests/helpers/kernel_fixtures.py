"""What the tests of the kernels share."""

from __future__ import annotations

import os
import shlex

import pytest
import torch

if command := os.environ.get("MINISGL_TEST_EMULATED"):  # `scripts/try_aarch64.py` sets it
    from helpers.emulated import Emulated
    from minisgl.kernel import jit

    emulated = Emulated(shlex.split(command))
    jit.load_library = lambda library=jit.CPU: emulated


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)
