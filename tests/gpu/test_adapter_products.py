"""Products of adapters for few tokens, against float64. `TRITON_INTERPRET=1` runs them on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl_kernels.triton.adapters import MAX_TOKENS, AdapterProducts

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(
    ("inputs", "sizes", "a_of"),
    [
        (1024, (2048, 1024, 1024), (0, 1, 2)),  # q, k and v
        (3072, (1024,), (0,)),
        (200, (40, 24), (0, 0)),  # two parts with one A
        (5120, (30, 7), (1, 0)),  # outputs that no power of two divides
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("num_tokens", "slots", "rank"),
    [(1, 1, 16), (5, 3, 16), (64, 8, 16), (65, 2, 64), (7, 3, 128), (256, 8, 32), (64, 20, 16)],
)
def test_products_of_slots(
    num_tokens: int, slots: int, rank: int, inputs: int, sizes: tuple[int, ...],
    a_of: tuple[int, ...], dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    gen = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    columns = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    x, y = draw(num_tokens, inputs), draw(num_tokens, ends[-1])
    a = draw(slots, max(a_of) + 1, rank, inputs) * inputs**-0.5
    b = draw(slots, rank, ends[-1])
    own = torch.randint(slots + 1, (num_tokens,), generator=gen, dtype=torch.int32)
    own[0] = slots
    if slots > 1:  # another adapter may overflow on these tokens
        own[own == 1] = 0
        a[0] = torch.inf
    want = y.double().cpu()
    for t, slot in enumerate(own.tolist()):
        for name, at in zip(a_of, columns, strict=True):
            if slot:
                h = (a[slot - 1, name].double() @ x[t].double()).to(dtype)
                want[t, at] += (h.double() @ b[slot - 1, :, at].double()).cpu()
    before = y.clone()
    products, slots_T = kernels(columns, a_of, slots, rank, device), own.to(device)
    assert products.takes(num_tokens, rank)
    for _ in range(2):  # what the first run leaves must not be read by the second
        y = before.clone()
        products.up(products.down(x, slots_T, a), y, slots_T, b)
    error = (y.double().cpu() - want).abs().max() / want.abs().max()
    # h rounds the other way where its sum is close to the middle of two numbers.
    assert error <= 3 * ROUNDING[dtype], f"relative error {error:.1e}"
    without = own == 0
    assert torch.equal(y.cpu()[without], before.cpu()[without])


def kernels(
    columns: list[slice], a_of: tuple[int, ...], slots: int, rank: int, device: torch.device
) -> AdapterProducts:
    products: Any = SimpleNamespace(
        columns=columns, a_of=a_of, names=range(max(a_of) + 1), num_slots=slots, rank=rank
    )
    return AdapterProducts(products, device)


def test_what_the_kernels_take() -> None:
    products = kernels([slice(0, 64)], (0,), 1, 16, torch.device("cpu"))
    assert products.takes(MAX_TOKENS, 16)
    assert not products.takes(MAX_TOKENS + 1, 16)
    assert not products.takes(1, 8)
    assert not products.takes(1, 24)
