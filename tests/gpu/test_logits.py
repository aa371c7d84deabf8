"""Logits in float32 on a GPU, by every kernel: of two tokens that bfloat16 cannot tell apart, the
likelier one is chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.packed_forms import FORMS, make
from minisgl.core import BatchSamplingArgs
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.packed import PackedGemms
from minisgl_kernels.packed_skinny import PackedSkinny
from minisgl_kernels.skinny import SkinnyGemms

ROWS = (1, 2, 3, 24, 64, 65, 256)
SHAPES = [(1000, 256), (16_008, 4096)]
"""Outputs and inputs. The second is large enough for skinny GEMMs."""


@pytest.fixture(scope="module")
def ops() -> TunedOps:
    skinny = on_hopper(SkinnyGemms, "no skinny GEMMs")
    return TunedOps(skinny, on_hopper(PackedSkinny, "no skinny GEMMs by packed weights"))


def close_rows(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows in which few numbers differ from the first row's, in the last digit."""
    first = torch.randint(-127, 128, (inputs,), device="cuda")
    changes = torch.randint(-1, 2, (outputs, inputs), device="cuda")
    changes *= torch.rand((outputs, inputs), device="cuda") < 8 / inputs
    return ((first + changes) / 128).to(dtype)


def check(
    ops: TunedOps, logits: torch.Tensor, exact: torch.Tensor, inputs: int, *, is_tie: bool = True
) -> None:
    """A matrix instruction adds 16 products to a sum and cuts off what float32 does not hold: a
    unit in its last place each time, at most, where all products have one sign."""
    assert logits.dtype == torch.float32
    assert logits.shape == exact.shape
    error = max(2**-17, inputs / 16 * 2**-23) * exact.abs().amax(-1)
    assert ((logits.double() - exact).abs().amax(-1) <= error).all()
    ids = ops.sample(logits, BatchSamplingArgs(all_greedy=True)).long()
    assert (exact.amax(-1) - exact.gather(1, ids[:, None])[:, 0] <= 2 * error).all()
    rounded = exact.bfloat16()
    ties = (rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1
    assert not is_tie or ties.any(), "no tie to be found"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_plain_tables(dtype: torch.dtype, rows: int, shape: tuple[int, int], ops: TunedOps) -> None:
    torch.manual_seed(0)
    table = close_rows(*shape, dtype)
    sizes = 1 + torch.rand(rows, shape[1], device="cuda")
    x = (sizes * (table[0].sign() + 0.5).sign()).to(dtype)
    torch.cuda.synchronize()  # weights are fetched while the kernel before still runs
    check(ops, ops.logits(x, table), x.double() @ table.double().T, shape[1])


@pytest.mark.parametrize("form", ["fp8 blocks", "int8 rows", "int4", "int4 zeros", "MXFP4"])
@pytest.mark.parametrize("rows", [*ROWS, 300])
def test_packed_tables(rows: int, form: str, ops: TunedOps) -> None:
    """Up to 128 rows decode tiles; more dequantise, which rounds the weights to bfloat16."""
    weight, values = make((192, 384), device=torch.device("cuda"), **FORMS[form])
    x = torch.randn(rows, 384, device="cuda").bfloat16()
    table = values if rows <= 128 else values.bfloat16().double()
    gemms = PackedGemms(ops, weight, torch.bfloat16)
    check(ops, gemms.logits(x), x.double() @ table.T, 384, is_tie=False)


def test_in_a_graph(ops: TunedOps) -> None:
    table = close_rows(2000, 512, torch.bfloat16)
    x = torch.randn(16, 512, device="cuda").bfloat16()
    expected = ops.logits(x, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = ops.logits(x, table)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(logits, expected)
