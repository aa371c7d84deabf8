"""The Triton gates of hybrids' layers against the reference, with rows that are parts of wider
ones. `TRITON_INTERPRET=1` runs them on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.ops import Ops
from minisgl.layers.moe import add_gated
from minisgl.quantization import PlainWeight
from minisgl_kernels.triton import gates as triton_gates
from minisgl_kernels.triton.gates import TritonGates
from minisgl_zoo.recurrent.gates import Gates

REFERENCE, FAST = Gates(Ops()), TritonGates(Ops())
# One unit in the last place of the largest value, or two where two roundings can part.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = list(TOLERANCE)
TOKENS = (1, 3, 300)


def check(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error <= TOLERANCE[want.dtype], f"relative error {error:.2e}"


def part(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random columns of a wider tensor."""
    rows, size = shape
    return (torch.randn(rows, size + 24, device=device) * 3).to(dtype)[:, 16 : 16 + size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_heads", [32, 5])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_delta(num_tokens: int, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(num_tokens)
    ba = part((num_tokens, 2 * num_heads), dtype, device)
    ba[-1, num_heads:] = torch.linspace(-30, 30, num_heads, device=device).to(dtype)
    a_log, dt_bias = torch.randn(2, num_heads, device=device)
    (g, beta), (want_g, want_beta) = (x.delta(ba, a_log, dt_bias) for x in (FAST, REFERENCE))
    # Each value: a decay near 1 keeps its digits.
    torch.testing.assert_close(g, want_g, rtol=2e-6, atol=0)
    torch.testing.assert_close(beta, want_beta, rtol=TOLERANCE[dtype], atol=0)
    assert torch.equal(beta.to(dtype).float(), beta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "size"), [(32, 128), (3, 20)], ids=str)
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_norm(
    num_tokens: int, few: bool, num_heads: int, size: int, dtype: torch.dtype,
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """few: one row a program; else several."""
    if device.type == "cpu":
        num_tokens = min(num_tokens, 30)  # the interpreter is slow
    torch.manual_seed(num_tokens)
    monkeypatch.setattr(triton_gates, "FEW_ROWS", 1 << 30 if few else 0)
    x = torch.randn(num_tokens, num_heads, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    z = part((num_tokens, num_heads * size), dtype, device)
    got, want = (gates.norm(x, weight, 1e-6, z) for gates in (FAST, REFERENCE))
    check(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2048, 1027])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_add(num_tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(num_tokens)
    x, h, y = (part((num_tokens, size), dtype, device) for _ in range(3))
    weight = (torch.randn(1, size, device=device) * size**-0.5).to(dtype)
    gate = PlainWeight.of(Ops(), weight)
    check(triton_gates.add_gated(x, h, gate, y), add_gated(x, h, gate, y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "size"), [(16, 256), (3, 20)], ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_output(
    num_tokens: int, num_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The gates are every other part of a wider row."""
    if device.type == "cpu":
        num_tokens = min(num_tokens, 30)  # the interpreter is slow
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, num_heads * size, device=device).to(dtype)
    rows = torch.randn(num_tokens, 2 * num_heads * size + 8, device=device).to(dtype)
    gate = rows[:, : 2 * num_heads * size].unflatten(1, (num_heads, 2, size))[:, :, 1]
    check(FAST.output(x, gate), REFERENCE.output(x, gate))
    taken = torch.arange(0, num_tokens, 2, device=device)
    got, want = (gates.output(x[taken], gate[taken]) for gates in (FAST, REFERENCE))
    check(got, want)
    of_heads = gate[:, :, :1]
    check(FAST.output(x, of_heads), REFERENCE.output(x, of_heads))
