"""GEMMs of many rows by one matrix of packed weights, whose tiles blocks share, beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.packed_forms import DTYPE, FORMS, TOLERANCE, check, make
from minisgl.kernel.ops import Activation, Ops
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.packed import PackedGemms
from minisgl_kernels.packed_grouped import PackedGrouped
from minisgl_kernels.stream import MOST_ROWS
from minisgl_zoo.weights.quantised import Packed

READ = tuple(form for form in FORMS if not form.startswith(("uint8", "fp8")))
SIZES = ((192, 384), (4096, 2880), (1040, 5120), (7168, 1024))
"""Fewer parts than blocks; a tile that is not full; tiles that many blocks share; whole tiles."""


@pytest.fixture(scope="module")
def grouped() -> PackedGrouped:
    made = on_hopper(PackedGrouped, "no GEMMs")
    if made is None:
        pytest.skip("these GEMMs are for Hopper")
    return made


def prepared(
    grouped: PackedGrouped, form: str, size: tuple[int, int], device: torch.device
) -> tuple[Packed, torch.Tensor]:
    weight, values = make(size, device=device, **FORMS[form])
    stack = grouped.prepare(weight)
    assert stack is not None
    return stack, values


def product(
    grouped: PackedGrouped, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None,
    gate: Activation | None = None,
) -> torch.Tensor:  # fmt: skip
    y = grouped.linear(x, weight, bias, gate)
    assert y is not None
    assert grouped._stream.done is not None
    assert not grouped._stream.done.any()
    return y


@pytest.mark.parametrize("form", READ)
def test_sizes_and_rows(form: str, grouped: PackedGrouped, device: torch.device) -> None:
    for outputs, inputs in SIZES:
        if inputs % 128 and FORMS[form].get("group", 0) > 64:
            continue
        weight, values = prepared(grouped, form, (outputs, inputs), device)
        bias = torch.randn(outputs, device=device).to(DTYPE)
        for rows in (1, 16, 33, MOST_ROWS, MOST_ROWS + 1, 256, 1000):
            x = (torch.randn(rows, inputs, device=device) / 8).to(DTYPE)
            check(product(grouped, x, weight, bias), x.double() @ values.T + bias.double())


@pytest.mark.parametrize("form", ["int4", "NVFP4", "int8 groups"])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates(form: str, gate: Any, grouped: PackedGrouped, device: torch.device) -> None:
    for size in ((192, 384), (2080, 5120)):
        weight, values = prepared(grouped, form, size, device)
        bias = torch.randn(size[0], device=device).to(DTYPE)
        for rows in (9, MOST_ROWS, 300):
            x = (torch.randn(rows, size[1], device=device) / 16).to(DTYPE)
            want = Ops().linear(x.double(), values, bias.double(), gate)
            check(product(grouped, x, weight, bias, gate), want, 2 * TOLERANCE)


def test_a_row_is_the_same_each_time_and_beside_others(
    grouped: PackedGrouped, device: torch.device
) -> None:
    weight, _ = prepared(grouped, "int4", (1040, 5120), device)
    x = (torch.randn(MOST_ROWS, 5120, device=device) / 8).to(DTYPE)
    first = product(grouped, x, weight)
    for _ in range(50):
        assert torch.equal(product(grouped, x, weight), first)
    for rows in (9, 40, 97):
        assert torch.equal(product(grouped, x[:rows], weight), first[:rows])


def test_products_one_behind_the_other_are_captured(
    grouped: PackedGrouped, device: torch.device
) -> None:
    """They exchange sums through the same memory."""
    ops = TunedOps(packed_grouped=grouped)
    pairs = [make((2048, 2048), device=device, **FORMS[form]) for form in ("int4", "int4 rows")]
    gemms = [PackedGemms(ops, weight, DTYPE) for weight, _ in pairs]
    assert all(each._streamed for each in gemms)
    x = (torch.randn(64, 2048, device=device) / 8).to(DTYPE)

    def run() -> torch.Tensor:
        y = x
        for index in range(8):
            y = gemms[index % 2].linear(y, None, None)
            y = (y / y.abs().max()).contiguous()
        return y

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(10):
        graph.replay()
        assert torch.equal(got, want)


def test_what_is_left_to_others(grouped: PackedGrouped, device: torch.device) -> None:
    weight, _ = make((192, 384), device=device, **FORMS["uint8"])
    assert grouped.prepare(weight) is None
    stack, _ = prepared(grouped, "int4", (208, 384), device)
    x = torch.randn(20, 384, device=device)
    assert grouped.linear(x.half(), stack, None, None) is None
    assert grouped.linear(x.to(DTYPE), stack, None, "silu") is None  # halves of 104
