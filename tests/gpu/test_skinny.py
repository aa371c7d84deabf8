"""Skinny GEMMs against float64: every kernel config, and the configs that shapes choose."""

from __future__ import annotations

import pytest
import torch

from helpers.gemm_error import ROUNDOFF, exact_gemm, gated, rounding

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl_kernels.hopper import SHARED_BYTES
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.skinny import GemmConfig, SkinnyGemms


@pytest.fixture(scope="module")
def skinny() -> SkinnyGemms:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for Hopper")
    return SkinnyGemms()


def _check(
    skinny: SkinnyGemms,
    config: GemmConfig,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
) -> None:
    torch.manual_seed(rows * outputs + inputs)
    count = outputs * (2 if config.gated else 1)
    x = torch.randn(rows, inputs, device="cuda").to(dtype)
    weight = (torch.randn(count, inputs, device="cuda") * inputs**-0.5).to(dtype)
    b = torch.randn(count, device="cuda").to(dtype) if bias else None
    torch.cuda.synchronize()  # weights are fetched while the kernel before still runs
    got = skinny.linear(x, weight, b, config)
    want, error = exact_gemm(x, weight, b)
    if config.gated:
        want, error = gated(want, error, dtype)
    error += rounding(want.abs() + error, dtype)
    assert got.shape == want.shape
    assert got.dtype == dtype
    worst = ((got.double() - want).abs() / error).max().item()
    assert worst <= 1, f"{config}, {rows} rows: {worst:.2f} of the error that rounding explains"
    assert torch.equal(skinny.linear(x, weight, b, config), got)


CONFIGS = [
    *((columns, split, False, False) for columns in (16, 48, 80, 256) for split in (1, 3, 8)),
    *((columns, split, True, False) for columns in (16, 48, 96, 208) for split in (1, 2, 5)),
    *((columns, 1, True, True) for columns in (16, 40, 136, 256)),
]


@pytest.mark.parametrize("values", CONFIGS, ids=lambda x: "-".join(str(int(v)) for v in x))
def test_every_config(values: tuple[int, int, bool, bool], skinny: SkinnyGemms) -> None:
    config = GemmConfig(*values)
    for rows in (64, 35):
        if config.shared_bytes(rows, 1024) <= SHARED_BYTES:
            _check(skinny, config, rows, outputs=600, inputs=1024, bias=rows == 35)


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("rows", [2, 3, 8, 33, 64])
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),  # 0.6B
        (17_408, 5120, True), (5120, 17_408, False),  # 14B
        (2560, 5120, False), (5120, 2048, False), (6400, 5120, True),  # a quarter of 32B
        (8, 64, False), (40, 128, True), (72, 320, False), (2048, 192, True),
    ],
)  # fmt: skip
def test_what_a_shape_chooses(
    outputs: int, inputs: int, gated: bool, rows: int, dtype: torch.dtype, skinny: SkinnyGemms
) -> None:
    weight = torch.empty(outputs * (1 + gated), inputs, dtype=dtype, device="cuda")
    x = torch.empty(rows, inputs, dtype=dtype, device="cuda")
    config = skinny.config(x, weight, gated=gated)
    assert config is not None
    _check(skinny, config, rows, outputs, inputs, dtype)


def test_a_chain_in_a_graph_gives_what_it_gives_alone(skinny: SkinnyGemms) -> None:
    """Kernels that begin early must not read what the ones before have still to write."""
    torch.manual_seed(0)
    ops, hidden, inter, rows, layers = TunedOps(skinny), 1024, 3072, 16, 6
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    norm = torch.ones(hidden, device="cuda").bfloat16()
    weights = [
        (torch.randn(layers, out, into, device="cuda") * into**-0.5).bfloat16()
        for out, into in ((hidden, hidden), (2 * inter, hidden), (hidden, inter))
    ]

    def run(wait: bool) -> torch.Tensor:
        h, residual = x, x.clone()
        for square, gate_up, down in zip(*weights, strict=True):
            h, residual = ops.norm_linear(h, residual, norm, 1e-6, square, None)
            if wait:
                torch.cuda.synchronize()
            h, residual = ops.norm_linear(h, residual, norm, 1e-6, gate_up, None, "silu")
            if wait:
                torch.cuda.synchronize()
            h = ops.linear(h, down)
        return h

    torch.cuda.synchronize()
    want = run(wait=True)
    assert torch.equal(run(wait=False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(wait=False)
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_no_rows_are_none(skinny: SkinnyGemms) -> None:
    """A step that holds part of a prompt samples nothing: its last block has no rows."""
    ops = TunedOps(skinny)
    x, norm = torch.empty(0, 5120, device="cuda").bfloat16(), torch.ones(5120, device="cuda")
    weight = torch.zeros(2 * 17_408, 5120, device="cuda").bfloat16()
    assert ops.linear(x, weight).shape == (0, 2 * 17_408)
    got, _ = ops.norm_linear(x, None, norm.bfloat16(), 1e-6, weight, None, "silu")
    assert got.shape == (0, 17_408)
