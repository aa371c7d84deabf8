"""GEMMs on fp8 tensor cores, and the kernels that quantise their activations, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conftest import INTERPRET

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.ops import Activation, Ops
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.packed import PackedGemms
from minisgl_kernels.triton import fp8
from minisgl_kernels.triton.fp8_gemm import STREAMS, StreamConfig, stream_gemm
from minisgl_zoo.weights.quantised import Packed

DTYPE = torch.float16 if INTERPRET else torch.bfloat16  # which Triton's interpreter computes wrong
GATES: tuple[Activation, ...] = ("silu", "gelu_tanh")


def make(
    shape: tuple[int, int], device: torch.device, *, has_blocks: bool = True
) -> tuple[Packed, Tensor]:
    """A random weight with a scale for each block of 128 x 128 or each row, and its values."""
    draw = torch.Generator().manual_seed(sum(shape))
    numbers = torch.randn(shape, generator=draw).to(torch.float8_e4m3fn)
    outputs, inputs = shape
    size = (outputs // 128, inputs // 128) if has_blocks else (outputs, 1)
    scale = (torch.rand(size, generator=draw) + 0.5) / 8
    wide = scale.double().repeat_interleave(outputs // size[0], 0)
    values = numbers.double() * wide.repeat_interleave(inputs // size[1], 1)
    numbers, scale, values = (tensor.to(device) for tensor in (numbers, scale, values))
    if has_blocks:
        return Packed(kind="fp8", numbers=numbers, group=128, rows=128, scale=scale), values
    return Packed(kind="fp8", numbers=numbers, outer=scale[:, 0].contiguous()), values


def check(got: Tensor, want: Tensor, tolerance: float = 1.2e-2) -> None:
    assert got.shape == want.shape
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    assert error <= tolerance, error


@pytest.mark.skipif(INTERPRET, reason="Triton 3.6 rounds 124 to 64 there")
def test_activations_become_fp8(device: torch.device) -> None:
    x = torch.randn(19, 512, device=device).to(DTYPE)
    x[3, 128:256] = 0
    for block in (128, 512):
        numbers, scales = fp8.quantise(x, block)
        assert numbers.shape == (32, 512)
        assert scales.shape == (512 // block, 32)
        back = numbers.double().view(32, -1, block) * scales.t().double()[:, :, None]
        error = (back[:19] - x.double().view(19, -1, block)).abs()
        assert (error <= x.double().view(19, -1, block).abs() / 16 + 1e-4).all()
        assert not numbers[19:].double().any()


@pytest.mark.skipif(INTERPRET, reason="cuBLAS multiplies")
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_many_rows_in_fp8(form: str, device: torch.device) -> None:
    weight, values = make((512, 1024), device, has_blocks=form == "blocks")
    assert fp8.takes(weight, DTYPE) == (torch.cuda.get_device_capability() == (9, 0))
    if not fp8.takes(weight, DTYPE):
        pytest.skip("cuBLAS does not take it here")
    ops = TunedOps()
    gemms = PackedGemms(ops, weight, DTYPE)
    bias, norm = (torch.rand(size, device=device).to(DTYPE) for size in (512, 1024))
    for rows in (17, 65, 150, 192, 193, 1000):
        x, residual = ((torch.randn(rows, 1024, device=device) / 8).to(DTYPE) for _ in range(2))
        check(fp8.linear(x, weight, None), x.double() @ values.T, 0.04)
        check(gemms.linear(x, bias, None), x.double() @ values.T + bias.double(), 0.04)
        for added in (residual, None):
            got = gemms.norm_linear(x, added, norm, 1e-6, bias, "silu")
            wide = (x.double(), None if added is None else added.double(), norm.double())
            want = Ops().norm_linear(*wide, 1e-6, values, bias.double(), "silu")
            for each, expected in zip(got, want, strict=True):
                check(each, expected, 0.06)
            normed = ops.rms_norm(x if added is None else x + added, norm, 1e-6)
            check(got[0], gemms.linear(normed, bias, "silu").double())
        assert gemms.quantises(rows) == (form == "blocks")
        if gemms.quantises(rows):
            gate_up = torch.randn(rows, 2048, device=device).to(DTYPE)
            for gate in GATES:
                got_gated = gemms.gated_linear(gate_up, gate, bias)
                check(got_gated, gemms.linear(ops.gated(gate_up, gate), bias, None).double())


@pytest.mark.skipif(INTERPRET, reason="cuBLAS multiplies")
@pytest.mark.parametrize("inputs", [768, 640, 896])
def test_blocks_that_are_no_multiple_of_four(inputs: int, device: torch.device) -> None:
    """cuBLAS would read other scales, and says nothing."""
    weight, values = make((512, inputs), device)
    gemms = PackedGemms(TunedOps(), weight, DTYPE)
    for rows in (17, 32, 33, 65, 200, 1000):
        x = (torch.randn(rows, inputs, device=device) / 8).to(DTYPE)
        check(gemms.linear(x, None, None), x.double() @ values.T, 0.04)


def test_which_rows_are_rounded_to_fp8(device: torch.device) -> None:
    for inputs, most in ((768, 32), (1152, 64), (1024, None)):
        gemms = PackedGemms(TunedOps(), make((512, inputs), device)[0], DTYPE)
        gemms._is_fp8 = True
        of_rows = {rows: gemms.quantises(rows) for rows in (16, 17, 32, 33, 64, 65, 1000)}
        assert of_rows == {rows: rows > 16 and (most is None or rows <= most) for rows in of_rows}


@pytest.mark.parametrize("config", STREAMS, ids=lambda config: str(config.rows))
def test_streams_of_fp8_blocks(config: StreamConfig, device: torch.device) -> None:
    """Tiles of one program and of many, programs of several tiles; against the quantised numbers.
    A row has the same result beside others."""
    cases = [((256, 384), 5, (20,)), ((512, 256), 132, (config.rows,))]
    if not INTERPRET:
        sizes = ((7168, 5120), (5120, 1024), (128, 640))
        most = config.rows
        cases = [(shape, 132, (17, most - 13, most)) for shape in sizes]
    done = torch.zeros(1024, dtype=torch.int32, device=device)
    for shape, num_cores, counts in cases:
        weight, values = make(shape, device)
        assert weight.scale is not None
        x = (torch.randn(max(counts), shape[1], device=device) / 8).to(DTYPE)
        results = []
        for rows in counts:
            numbers, scales = fp8.quantise(x[:rows], 128)
            got = stream_gemm(
                numbers, scales, weight.numbers, weight.scale, rows, DTYPE, config, num_cores, done
            )
            blocks = numbers[:rows].double().view(rows, -1, 128)
            x64 = (blocks * scales.t()[:rows, :, None].double()).flatten(1)
            check(got, x64 @ values.T, 4e-3)
            results.append(got)
        assert all(torch.equal(results[-1][: len(result)], result) for result in results)
    assert not done.any()


@pytest.mark.skipif(INTERPRET, reason="Triton 3.6 rounds 124 to 64 there")
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_quantises(adds: bool, device: torch.device) -> None:
    x, residual = ((torch.randn(19, 640, device=device)).to(DTYPE) for _ in range(2))
    x[3, 128:256], residual[3, 128:256] = 0, 0
    norm = torch.rand(640, device=device).to(DTYPE)
    numbers, scales, total = fp8.norm_and_quantise(x, residual if adds else None, norm, 1e-6)
    assert torch.equal(total, x + residual if adds else x)
    assert not numbers[19:].double().any()
    back = (numbers.double().view(32, -1, 128) * scales.t().double()[:, :, None]).flatten(1)[:19]
    want = Ops().rms_norm(total.double(), norm.double(), 1e-6)
    assert ((back - want).abs() <= want.abs() / 15 + 3e-3).all()
    assert not back[3, 128:256].any()
