"""The C++ backend of recurrent layers against the reference: outputs, states and rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from helpers.recurrent_steps import check_backend
from minisgl import plugins
from minisgl.kernel.jit import load_library
from minisgl.kernel.ops import Ops
from minisgl_zoo.blocks.sandwich import Sandwich, create_sandwich
from minisgl_zoo.recurrent.backend import (
    CpuRecurrentBackend,
    TorchRecurrentBackend,
    create_recurrent_backend,
)
from minisgl_zoo.recurrent.gates import Gates, create_gates

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("is_mamba", [False, True], ids=["delta", "mamba2"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "dims", "taps", "page_size"),
    [((4, 2), (32, 48), 4, 16), ((3, 3), (12, 20), 2, 1), ((6, 1), (130, 128), 5, 64)],
    ids=str,
)
def test_a_backend_is_its_reference(
    heads: tuple[int, int],
    dims: tuple[int, int],
    taps: int,
    page_size: int,
    dtype: torch.dtype,
    is_mamba: bool,
) -> None:
    make = partial(CpuRecurrentBackend, load_library())
    check_backend(make, heads, dims, taps, page_size, dtype, TOLERANCE[dtype], is_mamba=is_mamba)


def test_a_gpu_without_kernels_computes_the_reference_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tuple(row for row in plugins.installed() if row.table != "ops")
    monkeypatch.setattr(plugins, "_installed", rows)
    made = create_recurrent_backend("triton", Ops(), torch.device("cuda"), 16, torch.empty(1, 4))
    assert isinstance(made, TorchRecurrentBackend)
    assert "minisgl_kernels is not installed" in caplog.text
    assert type(create_gates(GpuOps())) is Gates
    assert type(create_sandwich(GpuOps())) is Sandwich


class GpuOps(Ops):
    """Ops that say they are a GPU's."""

    name = "triton"
