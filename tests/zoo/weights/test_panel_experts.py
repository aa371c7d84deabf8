"""Quantised experts in one call, beside the loop that multiplies by one expert after another.

Planted once, and noticed: the factors, zeros or steps of the first expert for all, a bias of the
expert before, routing weights of the next pair.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Self, cast

import pytest
import torch
from torch import Tensor

from helpers.moe_cases import ACTIVATIONS
from minisgl.kernel.cpu import PANEL, CpuOps
from minisgl.kernel.jit import load_library
from minisgl.moe import Experts, TorchMoeBackend, create_moe_backend
from minisgl_zoo.weights.panel_experts import PanelMoeBackend
from minisgl_zoo.weights.panels import Panels
from minisgl_zoo.weights.quantised import QuantisedWeight

BF16 = torch.bfloat16
HELD, FIRST, TOTAL, TOP_K = 5, 2, 8, 3
HIDDEN, INNER = 256, 64
FORMS: dict[str, dict[str, Any]] = {
    "Q4_K": {"kind": "int4", "group": 16, "factor": True, "zero": True, "step": True, "per": 2},
    "Q4_1": {"kind": "int4", "group": 16, "step": True},
    "AWQ": {"kind": "int4", "group": 16, "zero": True, "scale": torch.bfloat16},
    "MXFP4": {"kind": "fp4", "group": 16, "scale": torch.uint8},
    "int8": {"kind": "int8", "group": 16, "scale": torch.float32},
    "fp8": {"kind": "fp8", "group": 16, "scale": torch.float32},
}


class Stack(QuantisedWeight):
    """Matrices that exist as panels alone."""

    def __init__(self, ops: CpuOps, panels: Panels) -> None:
        self.ops, self.dtype, self.panels = ops, BF16, panels

    def pack(self, ops: CpuOps) -> Panels | None:
        return self.panels

    def dense(self) -> Tensor:
        raise AssertionError("the kernels were not called")

    def __getitem__(self, index: int) -> Self:
        assert self.panels
        matrix = copy.copy(self)
        matrix.panels = self.panels[index]
        return matrix


@pytest.fixture(scope="module")
def fast() -> CpuOps:
    return CpuOps(load_library())


def draw(
    ops: CpuOps, outputs: int, inputs: int, kind: str, group: int, factor: bool = False,
    zero: bool = False, step: bool = False, per: int = 1, scale: torch.dtype = torch.float16,
) -> Stack:  # fmt: skip
    """Random panels. per: the groups of a scale."""
    draw = torch.Generator().manual_seed(outputs)
    panels, groups = HELD * outputs // PANEL, inputs // group
    width = inputs * PANEL // (2 if kind in ("int4", "fp4") else 1)

    def bytes_(*shape: int, most: int = 256) -> Tensor:
        return torch.randint(0, most, shape, generator=draw, dtype=torch.uint8)

    def scales() -> Tensor:
        shape = panels, groups // per, PANEL
        if scale == torch.uint8:
            return bytes_(*shape, most=4) + 120
        return (torch.rand(shape, generator=draw) * 0.01 + 0.001).to(scale)

    numbers = bytes_(panels, width)
    if kind == "fp8":
        numbers = torch.randn(panels, width, generator=draw).to(torch.float8_e4m3fn)
    made = Panels(
        kind=cast("Any", kind), numbers=numbers, group=group, scales=scales(),
        zeros=bytes_(panels, groups, PANEL, most=16) if zero else None, middle=8 if zero else 0,
        factors=bytes_(panels, groups, PANEL, most=60).view(torch.int8) if factor else None,
        steps=scales() if step else None, outputs=outputs, inputs=inputs,
    )  # fmt: skip
    return Stack(ops, made)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["silu", *ACTIVATIONS])
def test_one_call_equals_the_loop(fast: CpuOps, form: str, name: str) -> None:
    activation, has_bias = ACTIVATIONS.get(name, ("silu", False))
    rows = INNER if name == "squared" else 2 * INNER
    random = torch.Generator().manual_seed(1)
    experts = Experts(
        gate_up=draw(fast, rows, HIDDEN, **FORMS[form]),
        down=draw(fast, HIDDEN, INNER, **FORMS[form]),
        count=HELD, first=FIRST, total=TOTAL, top_k=TOP_K, renormalise=True, activation=activation,
        gate_up_bias=torch.randn(HELD, rows, generator=random).to(BF16) if has_bias else None,
        down_bias=torch.randn(HELD, HIDDEN, generator=random).to(BF16) if has_bias else None,
    )  # fmt: skip
    backend = create_moe_backend(fast, BF16, Stack)
    assert isinstance(backend, PanelMoeBackend)
    for tokens in (1, 2, 45):
        x = torch.randn(tokens, HIDDEN, generator=random).to(BF16)
        logits = torch.randn(tokens, TOTAL, generator=random).to(BF16)
        expected = TorchMoeBackend(fast).forward(x, logits, experts)
        y = backend.forward(x, logits, experts)
        # Sums are rounded once less, so results may round to the other side. The loop's
        # exponentials are torch's, so a sigmoid may, too.
        off = 2**-7 * expected.abs() + 1e-6 * expected.abs().max()
        off = 2**-6 * expected.abs().max() if name == "gpt-oss" else off
        assert ((y - expected).abs() <= off).all(), f"{tokens} tokens"
        assert expected.isfinite().all()
        assert expected.abs().max() > 0


def test_a_rank_without_tokens_adds_nothing(fast: CpuOps) -> None:
    experts = Experts(
        gate_up=draw(fast, 2 * INNER, HIDDEN, **FORMS["AWQ"]),
        down=draw(fast, HIDDEN, INNER, **FORMS["AWQ"]),
        count=HELD, first=0, total=TOTAL, top_k=1, renormalise=True,
    )  # fmt: skip
    x = torch.ones(2, HIDDEN, dtype=BF16)
    weights, ids = torch.ones(2, 1), torch.full((2, 1), HELD, dtype=torch.int32)
    backend = PanelMoeBackend(fast)
    assert not backend.routed(x, weights, ids, experts).any()
    later = replace(experts, first=3)
    assert backend.routed(x, weights, ids, later).any()
