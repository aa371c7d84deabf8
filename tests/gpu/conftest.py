"""Skips GPU tests if there is no GPU, but for two kinds, if Triton is installed.

`TRITON_INTERPRET=1` runs the tests of kernels on a CPU; the interpreter of Triton 3.6 needs numpy
below 2.4. Tests that only compile always run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = (
    *("test_triton_ops.py", "test_sampling_ops.py", "test_gpu_moe.py", "test_kv_split.py"),
    *("test_gpu_attention.py", "test_gpu_families.py", "test_gpu_compiles.py"),
    *("test_gpu_packed.py", "test_packed_experts.py", "test_fp8_gemm.py"),
    *("test_recurrent_kernels.py", "test_gpu_delta_hopper.py", "test_gates.py", "test_sandwich.py"),
    *("test_gpu_quantised_kv.py", "test_gpu_latents.py", "test_wide_prompts.py"),
    "test_adapter_products.py",
)
WITHOUT_BFLOAT16 = (
    *("test_triton_ops.py", "test_sampling_ops.py"),
    *("test_gates.py", "test_sandwich.py", "test_adapter_products.py"),
)
"""While they are interpreted."""
COMPILED = (
    *("test_gpu_targets.py", "test_packed_targets.py", "test_latent_targets.py"),
    *("test_launch.py", "test_tile_targets.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = str(Path(__file__).parent)
    for item in items:
        if not str(item.path).startswith(folder):
            continue
        item.add_marker(pytest.mark.gpu)
        interpretable = INTERPRET and item.path.name in INTERPRETED
        needs_gpu = not interpretable and item.path.name not in COMPILED
        if needs_gpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if interpretable and item.path.name in WITHOUT_BFLOAT16 and "bfloat16" in item.name:
            item.add_marker(pytest.mark.skip(reason="Triton 3.6 takes it for integers"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRET else "cuda")
