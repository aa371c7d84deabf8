"""GEMMs by weights of GGUF files on Hopper, beside the values that the package gguf reads, rounded.

Planted once, and noticed: the other step of a turn, the tile of the other half, rows g and g + 8
exchanged, columns of x in their order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.gguf_blocks import draw
from minisgl.kernel.ops import Ops
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.stream import MOST_ROWS
from minisgl_kernels.tile_grouped import TileGrouped
from minisgl_kernels.tiles import MAX_DECODED, STREAM_ROWS, TileGemms
from minisgl_zoo.gguf.tiles import TILE_FORMS, pack_tiles

BF16 = torch.bfloat16
ROWS = (9, 17, 33, 64, 70, MOST_ROWS, MOST_ROWS + 1, STREAM_ROWS[-1])


@pytest.fixture(scope="module")
def ops() -> TunedOps:
    made = on_hopper(TileGrouped, "no GEMMs")
    if made is None:
        pytest.skip("these GEMMs are for Hopper")
    return TunedOps(tile_grouped=made)


def make(
    ops: TunedOps, kind: str, shape: tuple[int, int], device: torch.device
) -> tuple[TileGemms, torch.Tensor]:
    """Return the products by a random matrix, and its values, rounded."""
    blocks, values = draw(kind, 5, shape)
    gemms = TileGemms(ops, pack_tiles(kind, blocks.to(device)))
    return gemms, values.to(device).to(BF16).double()


def check(got: torch.Tensor, want: torch.Tensor, bound: float = 2**-8) -> None:
    """bound: of each result, and a 16th of it of the largest."""
    limit = bound * (want.abs() + want.abs().max() / 16)
    error = ((got.double() - want).abs() / limit).max().item()
    assert error <= 1, error


def settled(ops: TunedOps) -> bool:
    """Whether all sums that blocks have exchanged were read."""
    assert ops.tile_grouped
    done = ops.tile_grouped._stream.done
    assert done is not None
    return not done.any()


@pytest.mark.parametrize("kind", TILE_FORMS)
def test_products(kind: str, ops: TunedOps, device: torch.device) -> None:
    """Fewer parts than blocks; a tile that is not full; inputs that many blocks share."""
    for shape in ((96, 768), (208, 2816), (1040, 8192)):
        gemms, values = make(ops, kind, shape, device)
        bias = torch.randn(shape[0], device=device).to(BF16)
        for rows in ROWS:
            x = (torch.randn(rows, shape[1], device=device) / 8).to(BF16)
            x[:, 7] *= 300  # what models' activations have
            exact = x.double() @ values.T
            check(gemms.linear(x, bias, None), exact + bias.double())
            out = torch.full((rows, shape[0] + 32), 7.0, dtype=BF16, device=device)
            gemms.linear_into(x, None, out[:, 16:-16])
            check(out[:, 16:-16], exact)
            assert (out[:, :16] == 7).all()
            assert (out[:, -16:] == 7).all()
            assert settled(ops)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates(kind: str, gate: Any, ops: TunedOps, device: torch.device) -> None:
    for outputs, inputs in ((96, 512), (2080, 4096)):
        gemms, values = make(ops, kind, (outputs, inputs), device)
        bias = torch.randn(outputs, device=device).to(BF16)
        for rows in ROWS:
            x = (torch.randn(rows, inputs, device=device) / 8).to(BF16)
            wide = (x.double() @ values.T + bias.double()).to(BF16).double()
            check(gemms.linear(x, bias, gate), Ops().gated(wide, gate), 2**-6)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_a_turn_that_is_not_full(kind: str, ops: TunedOps, device: torch.device) -> None:
    for inputs in (64, 576, 2240):
        gemms, values = make(ops, kind, (32, inputs), device)
        for rows in (17, 64, 150):
            x = torch.randn(rows, inputs, device=device).to(BF16)
            check(gemms.linear(x, None, None), x.double() @ values.T)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0"])
def test_a_row_is_the_same_each_time_and_beside_others(
    kind: str, ops: TunedOps, device: torch.device
) -> None:
    gemms, _ = make(ops, kind, (1040, 4096), device)
    x = torch.randn(MOST_ROWS, 4096, device=device).to(BF16)
    first = gemms.linear(x, None, None)
    for _ in range(50):
        assert torch.equal(gemms.linear(x, None, None), first)
    for rows in (17, 40, 97):
        assert torch.equal(gemms.linear(x[:rows], None, None), first[:rows])


def test_products_one_behind_the_other_are_captured(ops: TunedOps, device: torch.device) -> None:
    """They exchange sums through the same memory."""
    gemms = [make(ops, kind, (2048, 2048), device)[0] for kind in ("Q4_K", "Q6_K")]
    x = (torch.randn(64, 2048, device=device) / 8).to(BF16)

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


def test_rows_that_are_left_to_others(
    ops: TunedOps, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all rows, where the kernel cannot be made."""
    blocks, exact = draw("Q4_K", 5, (64, 512))
    gemms = TileGemms(ops, pack_tiles("Q4_K", blocks.to(device)))
    asked: list[int] = []
    monkeypatch.setattr(TileGrouped, "linear", lambda self, x, *_: bool(asked.append(len(x))))
    for rows in (8, 16, 17, 64, 65, STREAM_ROWS[-1], STREAM_ROWS.stop):
        x = (torch.randn(rows, 512, device=device) / 8).to(BF16)
        values = exact.to(device) if rows <= MAX_DECODED else exact.to(device).to(BF16)
        check(gemms.linear(x, None, None), x.double() @ values.double().T)
    assert asked == [16, 17, 64, 65, STREAM_ROWS[-1]]
