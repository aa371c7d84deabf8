"""Each Triton op against its plain-torch reference, in every dtype."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.ops import Activation, Ops
from minisgl.kvcache.pool import LayerPool
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.triton import rotary

REFERENCE, FAST = Ops(), TunedOps()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# One unit in the last place of the largest value, or two where two roundings can part.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error <= TOLERANCE[want.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1024), (7, 48), (64, 5120), (3, 1)])
def test_norms(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(rows)
    x, residual = (torch.randn(2, rows, size, device=device) * 3).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    check(FAST.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    got = FAST.add_rms_norm(x, residual, weight, 1e-6)
    want = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    check(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 33), (5, 9000)])
def test_masks(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(rows, vocab, device=device).to(dtype)
    chosen = torch.arange(0, rows, 2, device=device)
    words = torch.randint(-(2**31), 2**31, (len(chosen), -(-vocab // 32)), device=device)
    got = FAST.mask(logits, chosen, words.int())
    assert torch.equal(got, REFERENCE.mask(logits, chosen, words.int()))
    assert got.isneginf().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 3072), (5, 81), (33, 1025)])
def test_activations(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(size)
    x = (torch.randn(rows, 2 * size, device=device) * 3).to(dtype)
    for gate in get_args(Activation):
        check(FAST.gated(x, gate), REFERENCE.gated(x, gate))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", ["", "qk", "qkv"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [((16, 8), 128, 128), ((5, 1), 20, 20), ((4, 2), 80, 32), ((16, 4), 512, 512)],
)
def test_norm_rope_store(
    heads: tuple[int, int],
    head_dim: int,
    rotary_dim: int,
    normed: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(head_dim)
    num_q, num_kv = heads
    tokens, pages, page_size = 9, 5, 4
    qkv = torch.randn(tokens, (num_q + 2 * num_kv) * head_dim, device=device).to(dtype)
    weights = torch.randn(2, head_dim, device=device).to(dtype)
    table = torch.randn(50, rotary_dim, device=device)
    positions = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32)
    slots = torch.randperm(pages * page_size, device=device)[:tokens].int()
    slots[3] = -1
    pools = []
    for _ in range(2):
        shape = (2, pages, page_size, num_kv, head_dim)
        k, v = torch.full(shape, 7.0, dtype=dtype, device=device)
        pools.append(LayerPool(k=k, v=v))
    q, k, v = rotary.norm_rope_store(
        qkv,
        pools[0],
        slots,
        positions,
        table,
        weights[0] if normed else None,
        weights[1] if normed else None,
        1e-6,
        num_q_heads=num_q,
        num_kv_heads=num_kv,
        head_dim=head_dim,
        keep=True,
        norms_values="v" in normed,
    )
    sizes = [num_q * head_dim, num_kv * head_dim, num_kv * head_dim]
    want_q, want_k, want_v = (x.view(tokens, -1, head_dim) for x in qkv.split(sizes, -1))
    if normed:
        want_q = REFERENCE.rms_norm(want_q, weights[0], 1e-6)
        want_k = REFERENCE.rms_norm(want_k, weights[1], 1e-6)
    if "v" in normed:
        want_v = REFERENCE.rms_norm(want_v, torch.ones(head_dim, device=device), 1e-6)
    want_q, want_k = REFERENCE.apply_rope(want_q, want_k, table, positions)
    REFERENCE.store_kv(want_k, want_v.contiguous(), slots, pools[1])
    check(q, want_q.contiguous())
    check(k, want_k.contiguous())
    check(v, want_v)
    check(pools[0].k, pools[1].k)
    check(pools[0].v, pools[1].v)
    if "v" not in normed:
        assert torch.equal(v, want_v)
        assert torch.equal(pools[0].v, pools[1].v)


def test_norm_and_rope_of_queries_alone(device: torch.device) -> None:
    q = torch.randn(5, 3 * 24, device=device)
    weight, table = torch.randn(24, device=device), torch.randn(50, 24, device=device)
    positions, slots = torch.arange(10, 20, device=device).int().view(2, 5)
    k, v = torch.full((2, 2, 4, 2, 24), 7.0, device=device)
    pool = LayerPool(k=k, v=v)
    got, *_ = rotary.norm_rope_store(
        q, pool, slots, positions, table, weight, None, 1e-6,
        num_q_heads=3, num_kv_heads=0, head_dim=24, keep=True,
    )  # fmt: skip
    normed = REFERENCE.rms_norm(q.view(5, 3, 24), weight, 1e-6)
    check(got, REFERENCE.apply_rope(normed, normed, table, positions)[0])
    assert (pool.k == 7).all()
    assert (pool.v == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 1024, 600), (2, 48, 80), (2, 3072, 64), (1, 6400, 30), (1, 17408, 3)],
)
def test_linear_of_few_rows(
    rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Also with norm, residual and activation."""
    torch.manual_seed(inputs)
    x, residual = torch.randn(2, rows, inputs, device=device).to(dtype)
    norm = torch.randn(inputs, device=device).to(dtype)
    weight = (torch.randn(2 * outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    offset = torch.randn(2 * outputs, device=device).to(dtype) if bias else None
    exact = REFERENCE.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    check(FAST.linear(x, weight, offset), exact.to(dtype))
    for before in (residual, None):
        for gate in (None, "silu", "gelu_tanh"):
            got = FAST.norm_linear(x, before, norm, 1e-6, weight, offset, gate)
            want = REFERENCE.norm_linear(x, before, norm, 1e-6, weight, offset, gate)
            check_linear(got[0], want[0])
            assert torch.equal(got[1], want[1])


def check_linear(got: torch.Tensor, want: torch.Tensor) -> None:
    """Sums in another order differ before they are rounded, and the activation follows."""
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error <= 2 * TOLERANCE[want.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("vocab", "share", "padded", "size"),
    [(100, range(50), 50, 1024), (211, range(160, 211), 64, 1100), (30, range(30, 30), 16, 5)],
)
def test_embedding_of_a_share(
    vocab: int, share: range, padded: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    table = torch.randn(padded, size, device=device).to(dtype)
    ids = torch.arange(vocab, dtype=torch.int32, device=device).roll(7)
    got = FAST.embed_share(ids, table, share)
    assert torch.equal(got, REFERENCE.embed_share(ids, table, share))
    whole = torch.zeros(vocab, size, dtype=dtype, device=device)
    whole[share.start : share.stop] = table[: len(share)]
    assert torch.equal(got, whole[ids.long()])


def test_the_first_kernels_of_a_step(device: torch.device) -> None:
    ids = torch.tensor([-1, 5, -1, 7, 8] + [3] * 600, dtype=torch.int32, device=device)
    last = torch.arange(100, 110, dtype=torch.int32, device=device)
    rows = torch.tensor([[4, 9, 0, 1]], dtype=torch.int32, device=device)
    assert torch.equal(
        FAST.take_ids(ids, rows[0, :3], last), REFERENCE.take_ids(ids, rows[0, :3], last)
    )
    assert FAST.take_ids(ids, rows[0, :3], last)[:4].tolist() == [104, 5, 100, 7]
    pages = torch.tensor([[0, 3, 3], [2, 0, 1], [11, 12, 13]], device=device)
    tables = torch.zeros(2, 4, 6, dtype=torch.int32, device=device)
    FAST.write_pages(tables[0], pages)
    REFERENCE.write_pages(tables[1], pages)
    assert torch.equal(tables[0], tables[1])
    assert tables[0].sum() == 36


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (1, 20), (3, 80)])
def test_store_kv(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Keys and values that are parts of a wider row, and slots that store nothing."""
    rows = torch.randn(9, 4 * heads * head_dim, device=device).to(dtype)
    k, v = (x.view(9, heads, head_dim) for x in rows.chunk(4, 1)[1:3])
    slots = torch.tensor([5, -1, 0, 31, 7, -1, 12, 13, 2], dtype=torch.int32, device=device)
    shape = (8, 4, heads, head_dim)
    pools = [
        LayerPool(**{x: torch.full(shape, 7.0, dtype=dtype, device=device) for x in ("k", "v")})
        for _ in range(2)
    ]
    for ops, pool in zip((FAST, REFERENCE), pools, strict=True):
        ops.store_kv(k, v, slots, pool)
    assert torch.equal(pools[0].k, pools[1].k)
    assert torch.equal(pools[0].v, pools[1].v)
