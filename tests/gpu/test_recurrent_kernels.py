"""The Triton kernels of recurrent layers against the reference. `TRITON_INTERPRET=1` runs them on a
CPU, in float32."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.recurrent_steps import check_backend
from minisgl_kernels.delta_decode import VALUES, DeltaDecode
from minisgl_kernels.hopper import TYPES, on_hopper
from minisgl_kernels.recurrent import TritonRecurrentBackend
from minisgl_kernels.triton import delta_decode

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("is_mamba", [False, True], ids=["delta", "mamba2"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "dims", "taps", "page_size"),
    [((4, 2), (32, 48), 4, 16), ((3, 3), (12, 20), 2, 1), ((4, 2), (128, 128), 4, 64)],
    ids=str,
)
def test_triton_is_the_reference(
    heads: tuple[int, int],
    dims: tuple[int, int],
    taps: int,
    page_size: int,
    dtype: torch.dtype,
    is_mamba: bool,
    device: torch.device,
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton 3.6 takes it for integers")
    if device.type == "cuda" and dtype == torch.float32 and dims == (128, 128):
        pytest.skip("its float32 GEMMs compile for a minute")
    make = TritonRecurrentBackend
    check_backend(
        make, heads, dims, taps, page_size, dtype, TOLERANCE[dtype], device, is_mamba=is_mamba
    )


@pytest.mark.parametrize("is_mamba", [False, True], ids=["delta", "mamba2"])
def test_heads_of_one_program_are_those_of_several(
    is_mamba: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in steps of many rows: all value heads of a key head in one program."""
    monkeypatch.setattr(delta_decode, "FROM_ROWS", 1)
    check_backend(
        TritonRecurrentBackend, (6, 2), (32, 48), 4, 16, torch.float32,
        TOLERANCE[torch.float32], device, is_mamba=is_mamba,
    )  # fmt: skip


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "page_size"), [((4, 2), 16), ((3, 1), 1), ((2, 2), 64)], ids=str)
def test_decode_rows_on_hopper_are_the_reference(
    heads: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    values: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = on_hopper(DeltaDecode, "not tested")
    if kernels is None:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(kernels, "_values", lambda num_states: values)
    make = partial(TritonRecurrentBackend, hopper=(kernels, None))
    check_backend(make, heads, (128, 128), 4, page_size, dtype, 2**-6, device, is_mamba=False)
