"""Products by packed weights of GGUF files, beside the values that the package gguf reads.

Planted once, and noticed: nibbles exchanged, the factors of another group, rows g and g + 8 of a
tile exchanged, a zero that is not subtracted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.gguf_blocks import draw
from minisgl.kernel.ops import Ops
from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import PlainWeight, WeightBuild
from minisgl_kernels import tiles
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.tiles import TileGemms
from minisgl_zoo.gguf.tile_weight import TileWeight
from minisgl_zoo.gguf.tiles import TILE_FORMS, Tiles, pack_tiles
from minisgl_zoo.gguf.weight import FileTypes, MergedWeight

BF16 = torch.bfloat16
ROWS = (1, 3, 8, 9, 16, 31, 64, 65)
"""Of each number of columns at least one; the last are dequantised."""


def made(kind: str, shape: tuple[int, int], device: torch.device) -> tuple[TileGemms, torch.Tensor]:
    """Return the products by a random matrix, and its values in float64."""
    blocks, values = draw(kind, 5, shape)
    return TileGemms(TunedOps(), pack_tiles(kind, blocks.to(device))), values.double().to(device)


def product(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """x @ values.T; the values of a weight that is dequantised are rounded."""
    if len(x) > tiles.MAX_DECODED:
        values = values.to(BF16).double()
    return x.double() @ values.T


def check(got: torch.Tensor, want: torch.Tensor, bound: float = 2**-8) -> None:
    """bound: of each result, and a 16th of it of the largest."""
    limit = bound * (want.abs() + want.abs().max() / 16)
    error = ((got.double() - want).abs() / limit).max().item()
    assert error <= 1, error


@pytest.mark.parametrize("kind", TILE_FORMS)
def test_values_are_the_files(kind: str, device: torch.device) -> None:
    """Rounded once."""
    gemms, values = made(kind, (96, 768), device)
    assert torch.equal(gemms.dense(), values.to(BF16))
    ids = torch.tensor([5, 95, 0, 40, 16, 5], device=device)
    assert torch.equal(gemms.rows(ids), values[ids].to(BF16))
    assert gemms.rows(ids[:0]).shape == (0, 768)


@pytest.mark.parametrize("kind", TILE_FORMS)
def test_products(kind: str, device: torch.device) -> None:
    # 2,816: a warp has one block of 256, or two; the last has none.
    gemms, values = made(kind, (96, 2816), device)
    bias = torch.randn(96, device=device).to(BF16)
    for rows in ROWS:
        x = torch.randn(rows, 2816, device=device).to(BF16)
        x[:, 7] *= 300  # what models' activations have
        exact = product(x, values)
        check(gemms.linear(x, bias, None), exact + bias.double())
        check(gemms.logits(x), x.double() @ values.T, 2**-12)
        out = torch.full((rows, 128), 7.0, dtype=BF16, device=device)
        gemms.linear_into(x, None, out[:, 16:112])
        check(out[:, 16:112], exact)
        assert (out[:, :16] == 7).all()
        assert (out[:, 112:] == 7).all()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates(kind: str, gate: str, device: torch.device) -> None:
    gemms, values = made(kind, (96, 512), device)
    odd, odd_values = made(kind, (48, 512), device)  # halves of 24 outputs
    for rows in ROWS:
        x = (torch.randn(rows, 512, device=device) / 8).to(BF16)
        for each, exact in ((gemms, values), (odd, odd_values)):
            wide = product(x, exact).to(BF16).double()
            check(each.linear(x, None, gate), Ops().gated(wide, gate), 2**-6)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "IQ4_NL"])
def test_rows_of_64_inputs_more(kind: str, device: torch.device) -> None:
    """Warps end within a batch of loads."""
    for inputs in (64, 576, 2240):
        gemms, values = made(kind, (32, inputs), device)
        for rows in (1, 9, 64):
            x = torch.randn(rows, inputs, device=device).to(BF16)
            check(gemms.linear(x, None, None), x.double() @ values.T)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0"])
def test_a_row_is_the_same_beside_any_others(kind: str, device: torch.device) -> None:
    gemms, _ = made(kind, (128, 4096), device)
    x = torch.randn(64, 4096, device=device).to(BF16)
    for most, fewer in ((8, (1, 3)), (64, (9, 16, 17, 32, 40))):
        whole = gemms.linear(x[:most], None, None)
        for rows in fewer:
            assert torch.equal(gemms.linear(x[:rows], None, None), whole[:rows])


def test_more_logits_than_a_block_has_rows(device: torch.device) -> None:
    gemms, values = made("Q6_K", (256, 1024), device)
    x = torch.randn(300, 1024, device=device).to(BF16)
    check(gemms.logits(x), x.double() @ values.T, 2**-12)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_that_share_inputs(kind: str, device: torch.device) -> None:
    """Each time alike, and no count is left behind."""
    gemms, values = made(kind, (1040, 8192), device)
    for rows in (9, 32, 64):
        x = torch.randn(rows, 8192, device=device).to(BF16)
        first = gemms.linear(x, None, None)
        check(first, x.double() @ values.T)
        for _ in range(20):
            assert torch.equal(gemms.linear(x, None, None), first)
        assert not gemms._done.any()


def test_products_are_captured(device: torch.device) -> None:
    gemms, values = made("Q4_K", (256, 1024), device)
    x = torch.randn(16, 1024, device=device).to(BF16)
    gemms.linear(x, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemms.linear(gemms.linear(x, None, None).repeat(1, 4), None, None)
    x.copy_(torch.randn(16, 1024, device=device) / 64)
    graph.replay()
    first = (x.double() @ values.T).to(BF16)
    check(y, first.repeat(1, 4).double() @ values.T, 2**-6)


def test_a_weight_of_three_formats(device: torch.device) -> None:
    """As the loader fills it."""
    kinds = ("Q4_K", "Q4_K", "Q6_K", "Q5_0")
    drawn = [draw(kind, index, (48, 512)) for index, kind in enumerate(kinds)]
    types = FileTypes(types={str(index): kind for index, kind in enumerate(kinds)})
    parts = [Part.whole(f"{index}.weight", 48, 512) for index in range(4)]
    weight = types(WeightBuild(ops=TunedOps(), dtype=BF16, parts=parts))
    assert isinstance(weight, MergedWeight)
    for parameter in weight.parameters():
        named = [drawn[int(part.name.partition(".")[0])][0] for part in parameter.parts]
        parameter.set(torch.cat(named).to(device))
    for node in weight.walk():
        node.init_buffers(device)
    values = torch.cat([each for _, each in drawn]).double().to(device)
    assert torch.equal(weight.dense(), values.to(BF16))
    bias = torch.randn(192, device=device).to(BF16)
    for rows in (1, 30, 200):
        x = torch.randn(rows, 512, device=device).to(BF16)
        check(weight.linear(x, bias), product(x, values) + bias.double(), 2**-7)
        norm = torch.rand(512, device=device).to(BF16)
        y, total = weight.norm_linear(x, None, norm, 1e-6, bias)
        assert total is x
        check(y, product(TunedOps().rms_norm(x, norm, 1e-6), values) + bias.double(), 2**-7)


def test_what_is_dequantised(device: torch.device) -> None:
    types = FileTypes(types={"0": "Q4_K", "1": "Q8_0"})
    for dtype, shape, why in (
        (torch.float16, (48, 512), "only in bfloat16"),
        (BF16, (24, 512), "no multiple of 16 outputs"),
    ):
        parts = [Part.whole("0.weight", *shape)]
        build = WeightBuild(ops=TunedOps(), dtype=dtype, parts=parts)
        assert why in (types.why_dequantised(build) or "")
        assert isinstance(types(build), PlainWeight)
    parts = [Part.whole("1.weight", 48, 96)]
    build = WeightBuild(ops=TunedOps(), dtype=BF16, parts=parts)
    assert types.why_dequantised(build) == "no multiple of 64 inputs"


@pytest.mark.parametrize("rows", [3, 30])
def test_a_kernel_that_cannot_be_made(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must not end a step: the weight is dequantised for the product."""
    gemms, values = made("Q4_K", (64, 512), device)
    for name in ("tiles_few", "tiles_many"):
        monkeypatch.setattr(tiles._kernels(name), "get", lambda numbers: None)
    x = torch.randn(rows, 512, device=device).to(BF16)
    rounded = x.double() @ values.to(BF16).double().T
    check(gemms.linear(x, None, None), rounded)
    check(gemms.linear(x, None, "silu"), Ops().gated(rounded.to(BF16).double(), "silu"), 2**-6)
    check(gemms.logits(x), rounded)


@pytest.mark.parametrize("plane", ["numbers", "factors", "scales"])
def test_a_planted_swap_is_noticed(plane: str, device: torch.device) -> None:
    """Of neighbouring steps, of rows g and g + 8."""
    blocks, values = draw("Q4_K", 5, (48, 512))
    packed = pack_tiles("Q4_K", blocks.to(device))
    tensor = getattr(packed, plane)
    swapped: Tiles = replace(packed, **{plane: tensor.flip(1 if plane != "factors" else 3)})
    right = TileGemms(TunedOps(), packed).dense()
    assert torch.equal(right, values.to(device).to(BF16))
    assert not torch.equal(TileGemms(TunedOps(), swapped).dense(), right)


def test_tiles_replace_the_blocks(device: torch.device) -> None:
    types = FileTypes(types={"0": "Q6_K"})
    blocks, values = draw("Q6_K", 5, (64, 512))
    weight = types(
        WeightBuild(ops=TunedOps(), dtype=BF16, parts=[Part.whole("0.weight", 64, 512)], rows=64)
    )
    assert isinstance(weight, TileWeight)
    assert weight.num_weight_bytes == blocks.nbytes  # Q6_K takes what it takes in the file
    next(weight.parameters()).set(blocks.to(device))
    weight.init_buffers(device)
    assert not weight.blocks.numel()
    ids = torch.tensor([63, 1], device=device)
    assert torch.equal(weight.rows(ids), values.to(device)[ids].to(BF16))
