"""Quantised weights find a GPU's kernels in the table `ops`, and compute without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl import plugins
from minisgl.kernel.ops import Ops
from minisgl.plugins import Row
from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import WeightBuild
from minisgl_zoo.weights.quantised import Packed, exact_16_bit, log_kernels
from minisgl_zoo.weights.scaled import Scaled, ScaledWeight

OUT, IN = 16, 64


class GpuOps(Ops):
    """Ops that say they are a GPU's."""

    name = "triton"


class ToyGemms:
    """Kernels for integers; `linear` counts the inputs."""

    def __init__(self, ops: Ops, weight: Packed, dtype: torch.dtype) -> None:
        self.weight = weight

    @staticmethod
    def reads(weight: Packed) -> bool:
        return weight.kind == "int8"

    def linear(self, x: Tensor, bias: Tensor | None, gate: Any) -> Tensor:
        return torch.full((len(x), self.weight.shape[-2]), float(x.shape[-1]))


def weight_of(number: torch.dtype, stacked: int | None = None) -> ScaledWeight:
    parts = [Part.whole(f"{i}.weight", OUT, IN) for i in range(stacked or 1)]
    build = WeightBuild(ops=GpuOps(), dtype=torch.bfloat16, parts=parts, stacked=stacked)
    weight = Scaled(number=number, unit=(1, 0))(build)
    for parameter in list(weight.parameters()):
        parameter.set(torch.ones(parameter.shape).to(parameter.dtype))
    weight.init_buffers(torch.device("cpu"))
    return weight


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("ops", "packed", f"{__name__}:ToyGemms", when={"ops": "triton"})
    monkeypatch.setattr(plugins, "_installed", (row,))


@pytest.mark.usefixtures("toy")
def test_kernels_multiply_what_they_read() -> None:
    x = torch.ones(2, IN, dtype=torch.bfloat16)
    weight = weight_of(torch.int8)
    assert weight.has_kernel
    assert weight.linear(x)[0, 0] == IN
    stack = weight_of(torch.int8, stacked=2)
    assert stack.packed_stack
    assert stack.packed_stack.shape == (2, OUT, IN)
    other = weight_of(torch.float8_e4m3fn)
    assert not other.has_kernel
    assert torch.equal(other.linear(x), F.linear(x, other.dense()))


@pytest.mark.parametrize("stacked", [None, 2])
def test_without_kernels_weights_are_dequantised_and_the_log_says_so(
    stacked: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugins, "_installed", ())
    weight = weight_of(torch.int8, stacked)
    assert not weight.has_kernel
    with caplog.at_level("INFO"):
        log_kernels(weight, ["int8"])
    assert "weights in int8 are dequantised in each GEMM" in caplog.text


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_scales_are_16_bits_where_that_changes_none(held: torch.dtype) -> None:
    both = torch.tensor([0.5, 0.01171875, -3.0]).to(held)
    assert exact_16_bit(both).dtype == torch.bfloat16
    large = torch.tensor([2.0**100]).to(held)
    assert exact_16_bit(large).dtype == torch.bfloat16
    assert torch.equal(exact_16_bit(large).float(), large.float())
    fine = torch.tensor([1 + 2.0**-10])
    assert exact_16_bit(fine).dtype == torch.float16
    assert exact_16_bit(torch.tensor([1 + 2.0**-20])).dtype == torch.float32
