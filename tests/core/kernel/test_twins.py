"""Each C++ op against its plain-torch reference, and the reference against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import load_library
from minisgl.kernel.ops import Activation, Ops
from minisgl.kvcache.pool import MHAKVCache

REFERENCE = Ops()
# Of the largest value: float32 differs by the order of sums and the last bits of exp; a 16-bit
# result by one rounding, where a float32 intermediate sits at the boundary.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
NUM_TOKENS = (1, 5, 300)


@pytest.fixture(scope="module")
def fast() -> CpuOps:
    return CpuOps(load_library())


def close(ours: Tensor, theirs: Tensor, *, mostly_equal: bool = True) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()
    assert error <= TOLERANCE[ours.dtype], f"relative error {error:.2e}"
    if mostly_equal and ours.dtype != torch.float32:
        assert (ours != theirs).double().mean() <= max(0.01, 1 / ours.numel())


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 16, 80, 1000, 1024])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_norms(fast: CpuOps, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, num_tokens, width).mul(3).to(dtype).unbind()
    for weight in (torch.randn(width).to(dtype), torch.randn(width)):
        close(fast.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
        ours = fast.add_rms_norm(x, residual, weight, 1e-5)
        theirs = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
        for a, b in zip(ours, theirs, strict=True):
            close(a, b)


def qkv(num_tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v as views of one projection, which is how a layer has them."""
    num_q, num_kv = heads
    merged = torch.randn(num_tokens, (num_q + 2 * num_kv) * dim).to(dtype)
    parts = merged.split([num_q * dim, num_kv * dim, num_kv * dim], dim=-1)
    return [part.view(num_tokens, -1, dim) for part in parts]


@DTYPES
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 128), (80, 32), (20, 20), (6, 2)])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rope_and_norm_of_strided_heads(
    fast: CpuOps, num_tokens: int, dim: int, rotary: int, dtype: torch.dtype
) -> None:
    q, k, _ = qkv(num_tokens, (6, 2), dim, dtype)
    weight = torch.randn(dim).to(dtype)
    angles = torch.rand(500, rotary // 2) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 500, (num_tokens,), dtype=torch.int32)
    before = q.clone()
    close(fast.rms_norm(q, weight, 1e-6), REFERENCE.rms_norm(q, weight, 1e-6))
    ours = fast.apply_rope(q, k, cos_sin, positions)
    theirs = REFERENCE.apply_rope(q, k, cos_sin, positions)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    assert torch.equal(q, before)


@DTYPES
@pytest.mark.parametrize("width", [1, 24, 100, 3072])
@pytest.mark.parametrize("gate", get_args(Activation))
def test_gated_activations(fast: CpuOps, gate: Activation, width: int, dtype: torch.dtype) -> None:
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, 2 * width).mul(4).to(dtype)
        # torch's GELU cancels to 0 in its far tail, where ours keeps the tiny value.
        close(fast.gated(x, gate), REFERENCE.gated(x, gate), mostly_equal=gate == "silu")


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 15), (49, 72), (96, 1000), (301, 64)])
def test_few_rows_by_float32_weights(fast: CpuOps, outputs: int, inputs: int) -> None:
    """Each number of rows is right, and a row's result is the same bits beside any others."""
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    x = torch.randn(40, inputs)
    alone = torch.cat([fast.linear(row, weight, bias) for row in x.split(1)])
    close(alone, REFERENCE.linear(x.double(), weight.double(), bias.double()).float())
    most = fast.most_plain_rows
    for rows in (0, 2, 3, 4, 5, 6, 7, min(13, most), most):
        assert torch.equal(fast.linear(x[:rows], weight, bias), alone[:rows])
    close(fast.linear(x, weight, bias), alone)  # by torch
    assert torch.equal(fast.logits(x[:5], weight), fast.linear(x[:5], weight))
    assert torch.equal(fast.linear(x[None, :4], weight, bias)[0], alone[:4])
    every_other = torch.randn(8, 2 * inputs)[:, ::2]
    close(fast.linear(every_other, weight), every_other @ weight.T)
    for ids in (torch.tensor([outputs - 1, 0, 0]), torch.tensor([], dtype=torch.int32)):
        for kind in (torch.int32, torch.int64):
            assert torch.equal(fast.embed(ids.to(kind), weight), weight[ids.long()])


def test_gates_and_odd_numbers_by_float32_weights(fast: CpuOps) -> None:
    x, weight = torch.randn(5, 40), torch.randn(24, 40)
    for gate in ("silu", "gelu_tanh"):
        close(fast.linear(x, weight, None, gate), REFERENCE.linear(x, weight, None, gate))
    x[1, 39], x[2, 0], weight[3, 5] = torch.nan, torch.inf, 0.0
    ours, theirs = fast.linear(x, weight), REFERENCE.linear(x, weight)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())
    with pytest.raises(ValueError, match="do not fit"):
        fast._plain_linear(x, weight, None, torch.empty(5, 25), 1)


def test_extremes_of_activations(fast: CpuOps) -> None:
    gate = torch.tensor([-torch.inf, -1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30, torch.nan])
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    for name in get_args(Activation):
        ours, theirs = fast.gated(x, name), REFERENCE.gated(x, name)
        finite = theirs.isfinite()
        torch.testing.assert_close(ours[finite], theirs[finite], rtol=1e-5, atol=1e-35)
        assert ours[0, -1].isnan()


@pytest.mark.parametrize(
    "dtype", [*TOLERANCE, torch.float8_e4m3fn], ids=lambda dtype: str(dtype)[6:]
)
def test_copies_find_numbers_that_are_not_finite(fast: CpuOps, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for size in (1, 63, 64, 1000, 40_000):
        source = torch.randn(size).to(dtype)
        source[size // 2] = -largest
        for target in (torch.empty(size, dtype=dtype), torch.empty(size)):
            for ops in (fast, REFERENCE):
                assert ops.copy_finite(source, target)
                assert torch.equal(target.float(), source.float())
        for index in {0, size // 3, size - 1}:
            for value in (torch.nan, torch.inf, -torch.inf):
                bad = source.clone()
                bad[index] = torch.tensor(value).to(dtype)
                is_finite = bool(bad.float().isfinite().all())  # float8 e4m3 has no infinity
                for ops in (fast, REFERENCE):
                    assert ops.copy_finite(bad, torch.empty(size, dtype=dtype)) == is_finite
                    assert ops.copy_finite(bad, torch.empty(size)) == is_finite
                    assert ops.all_finite(bad) == is_finite
    every_other = torch.tensor([1.0, torch.nan] * 500).to(dtype)[::2]
    assert fast.copy_finite(every_other, torch.empty(500, dtype=dtype))
    assert not fast.copy_finite(torch.full((9,), 1e38), torch.empty(9, dtype=torch.float16))


def test_shapes_that_do_not_fit_are_refused(fast: CpuOps) -> None:
    with pytest.raises(ValueError, match="rms_norm: 8 weights for rows of 4"):
        fast.rms_norm(torch.ones(2, 4), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="share a dtype"):
        fast.rms_norm(torch.ones(2, 4), torch.ones(4, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        fast.rms_norm(torch.ones(2, 4).double(), torch.ones(4).double(), 1e-6)


# --- the reference itself ----------------------------------------------------------------------


@DTYPES
def test_reference_norm_is_transformers(dtype: torch.dtype) -> None:
    """OLMo 2's, which rounds once; most families' norms round before the weight too."""
    x = torch.randn(9, 48).mul(3).to(dtype)
    norm = Olmo2RMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    assert torch.equal(REFERENCE.rms_norm(x, norm.weight, 1e-5), norm(x))


@DTYPES
def test_reference_rope_is_transformers(dtype: torch.dtype) -> None:
    config = Qwen3Config(head_dim=20, hidden_size=40, num_attention_heads=2)
    rotary = Qwen3RotaryEmbedding(config)
    q, k, _ = qkv(9, (4, 2), 20, dtype)
    positions = torch.randperm(100)[:9]
    cos, sin = rotary(q, positions[None])
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    angles = torch.arange(100)[:, None].float() * rotary.inv_freq[None]
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    got = REFERENCE.apply_rope(q, k, cos_sin, positions)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b[0].transpose(0, 1))


@DTYPES
@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu", torch.nn.SiLU()), ("gelu_tanh", torch.nn.GELU(approximate="tanh"))],
)
def test_reference_activations_are_torch(
    name: Activation, activation: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    gate, up = torch.randn(2, 5, 24).to(dtype).unbind()
    got = REFERENCE.gated(torch.cat((gate, up), dim=-1), name)
    # Vector and scalar paths of torch differ in a last bit of float32.
    torch.testing.assert_close(got, activation(gate) * up, rtol=3e-7, atol=1e-7)


def test_store_kv_skips_padding_and_leaves_the_rest() -> None:
    pool = MHAKVCache(
        num_layers=1,
        num_pages=3,
        page_size=2,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    ).layer(0)
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    k, v = torch.randn(2, 3, 2, 4).unbind()
    REFERENCE.store_kv(k, v, torch.tensor([5, -1, 2], dtype=torch.int32), pool)
    for stored, new in ((pool.k.flatten(0, 1), k), (pool.v.flatten(0, 1), v)):
        assert torch.equal(stored[5], new[0])
        assert torch.equal(stored[2], new[2])
        assert stored[[0, 1, 3, 4]].isnan().all()
    with pytest.raises(ValueError, match="the pool takes"):
        REFERENCE.store_kv(k.half(), v, torch.tensor([0, 1, 2], dtype=torch.int32), pool)
    with pytest.raises(ValueError, match="3 keys, 3 values, 2 slots"):
        REFERENCE.store_kv(k, v, torch.tensor([0, 1], dtype=torch.int32), pool)
