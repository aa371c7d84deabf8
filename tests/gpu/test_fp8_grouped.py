"""Grouped GEMMs on fp8 tensor cores against float64 of the same rounded numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.grouped_gemm import check_pairs

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.triton.moe import Gate
from minisgl.moe.base import ClampedGate, Experts
from minisgl_kernels.fp8_grouped import BLOCK, FEWEST_TOKENS, MOST, Fp8Grouped
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.packed_moe import PackedMoeBackend
from minisgl_kernels.triton.fp8 import quantise
from minisgl_zoo.weights.quantised import Packed

ADDED = 2.0**-12
"""What a sum may lose, relative to the sum of magnitudes: these tensor cores keep some 14 bits."""


@pytest.fixture(scope="module")
def gemms() -> Fp8Grouped:
    made = on_hopper(Fp8Grouped, "no fp8 GEMMs")
    if made is None:
        pytest.skip("the kernel is for Hopper")
    return made


def _weight(experts: int, outputs: int, inputs: int) -> tuple[Packed, Tensor]:
    """Return a stack and its values."""
    numbers = torch.randn(experts, outputs, inputs, device="cuda").to(torch.float8_e4m3fn)
    shape = (experts, outputs // BLOCK, inputs // BLOCK)
    scale = (torch.rand(shape, device="cuda") + 0.1) * inputs**-0.5
    each = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    packed = Packed(kind="fp8", numbers=numbers, group=BLOCK, rows=BLOCK, scale=scale)
    return packed, numbers.float() * each


def _rounded(x: Tensor) -> Tensor:
    """Return x as the kernels round it, in float64."""
    numbers, scale = quantise(x, BLOCK)
    return (numbers.double() * scale.t().repeat_interleave(BLOCK, 1).double())[: len(x)]


def _check(
    gemms: Fp8Grouped,
    counts: list[int],
    outputs: int,
    inputs: int,
    *,
    top_k: int = 1,
    is_gated: bool,
) -> None:
    torch.manual_seed(sum(counts) + outputs)
    share = top_k if is_gated else 1
    x = torch.randn(sum(counts) // share, inputs, device="cuda").bfloat16()
    # Rows of different sizes: each has scales of its own.
    x *= torch.logspace(-3, 3, len(x), device="cuda")[:, None]
    weight, values = _weight(len(counts), outputs * (1 + is_gated), inputs)
    exact_x = _rounded(x)

    def exact(expert: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        taken, dense = exact_x[rows], values[expert].double().T
        return taken @ dense, ADDED * (taken.abs() @ dense.abs())

    assert gemms.takes(x.new_zeros(FEWEST_TOKENS, inputs), weight, weight, Gate())
    check_pairs(
        partial(gemms.gemm, x, weight), exact, counts, outputs,
        share=share, dtype=x.dtype, is_gated=is_gated,
    )  # fmt: skip


@pytest.mark.parametrize("is_gated", [True, False])
def test_every_width(is_gated: bool, gemms: Fp8Grouped) -> None:
    counts = [*range(0, MOST + 1, 8), 1, MOST + 1, 2 * MOST - 3, 1000, 0]
    counts[0] += -sum(counts) % 4
    _check(gemms, counts, 384, 256, top_k=4, is_gated=is_gated)


@pytest.mark.parametrize(
    ("counts", "outputs", "inputs"),
    [
        ([1], 128, 128),
        ([0, 0, 3, 0], 128, 384),
        ([0] * 511 + [2000], 128, 128),
        ([300] * 8, 768, 2048),
        ([17] * 128, 2048, 768),
        ([0, 5000], 4096, 1024),
    ],
    ids=["one pair", "one expert", "the last of 512", "eight", "a decode step of 272", "two"],
)
@pytest.mark.parametrize("is_gated", [True, False])
def test_shapes(
    counts: list[int], outputs: int, inputs: int, is_gated: bool, gemms: Fp8Grouped
) -> None:
    _check(gemms, counts, outputs, inputs, is_gated=is_gated)


def _experts(activation: Any) -> Experts:
    """Return experts 1 to 4 of six."""

    class Stack:
        def __init__(self, packed: Packed, values: Tensor) -> None:
            self.packed_stack, self._values = packed, values

        def dense(self) -> Tensor:
            return self._values

    stacks: Any = {
        "gate_up": Stack(*_weight(4, 512, 384)),
        "down": Stack(*_weight(4, 384, 256)),
    }
    return Experts(
        **stacks, count=4, first=1, total=6, top_k=2, renormalise=True, activation=activation
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedGate(1.702, 7.0)], ids=str)
def test_the_backend_uses_them(activation: Any, gemms: Fp8Grouped) -> None:
    """Beside the same experts in float64, the outputs have the error of two roundings to fp8."""
    torch.manual_seed(0)
    experts = _experts(activation)
    x = torch.randn(200, 384, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(len(x))]).int().cuda()
    weights = torch.rand(len(x), 2, device="cuda")
    got = PackedMoeBackend(TunedOps(), gemms).routed(x, weights, ids, experts).double()
    decoded = PackedMoeBackend(TunedOps()).routed(x, weights, ids, experts).double()
    error = (got - decoded).pow(2).mean().sqrt() / decoded.pow(2).mean().sqrt()
    assert 0.01 < error < 0.06
