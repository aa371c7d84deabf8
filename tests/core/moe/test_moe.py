"""The experts on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers.moe_cases import ACTIVATIONS, TOLERANCE, exact, make_case
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl.moe import BaseMoeBackend, TorchMoeBackend, create_moe_backend
from minisgl.moe.base import CpuMoeBackend

CPU = torch.device("cpu")

# tokens, experts, top_k, hidden, inner, first expert held, experts held (None: all)
TABLE = [
    (1, 8, 2, 64, 128, 0, None),
    (2, 128, 8, 96, 33, 0, None),
    (3, 60, 4, 72, 40, 0, None),
    (7, 8, 1, 33, 50, 0, None),
    (33, 16, 3, 80, 72, 4, 5),
    (64, 64, 6, 17, 7, 32, 32),
    (200, 8, 8, 48, 19, 0, None),
]


@pytest.fixture(params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> BaseMoeBackend:
    if request.param == "torch":
        return TorchMoeBackend(Ops())
    return create_moe_backend(_cpu(), torch.float32)


def _cpu() -> Ops:
    ops = create_ops(CPU)
    if ops.name != "cpu":
        pytest.skip("the C++ kernels do not compile here")
    return ops


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("renormalise", [True, False], ids=["renormalised", "as they are"])
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_experts_match_float64(
    backend: BaseMoeBackend,
    case: tuple[int, int, int, int, int, int, int | None],
    renormalise: bool,
    dtype: torch.dtype,
) -> None:
    x, logits, experts = make_case(*case, renormalise=renormalise, dtype=dtype, device=CPU)
    weights, ids = Ops().route(logits, experts.top_k, experts.renormalise)
    want = exact(x, weights, ids, experts)
    got = backend.forward(x, logits, experts)
    assert got.dtype == dtype
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("case", [TABLE[1], TABLE[4], TABLE[6]], ids=str)
def test_other_activations_match_float64(
    backend: BaseMoeBackend,
    case: tuple[int, int, int, int, int, int, int | None],
    name: str,
    dtype: torch.dtype,
) -> None:
    activation, bias = ACTIVATIONS[name]
    x, logits, experts = make_case(*case, activation=activation, bias=bias, dtype=dtype, device=CPU)
    weights, ids = Ops().route(logits, experts.top_k, experts.renormalise)
    want = exact(x, weights, ids, experts)
    error = (backend.forward(x, logits, experts).double() - want).abs().max() / want.abs().max()
    assert error <= 1.5 * TOLERANCE[dtype], f"relative error {error:.2e}"  # more steps are rounded


def test_the_compiled_path_is_taken() -> None:
    assert isinstance(create_moe_backend(_cpu(), torch.float32), CpuMoeBackend)


def test_threads_and_neighbours_change_nothing() -> None:
    backend = CpuMoeBackend(_cpu())
    # 4 tokens of an expert, on average, which the C++ experts take in float32 only.
    x, logits, experts = make_case(24, 16, 3, 80, 72, dtype=torch.float32, device=CPU)
    together = backend.forward(x, logits, experts)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(backend.forward(x, logits, experts), together)
            for row in (0, 23):
                alone = backend.forward(x[row : row + 1], logits[row : row + 1], experts)
                assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_is_a_softmax_of_the_largest(renormalise: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 12)
    weights, ids = Ops().route(logits, 4, renormalise)
    want, want_ids = F.softmax(logits.double(), -1).topk(4)
    assert torch.equal(ids.long(), want_ids)
    if renormalise:
        want = want / want.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), want, rtol=1e-6, atol=0)


def test_of_equal_logits_the_first_are_chosen() -> None:
    assert Ops().route(torch.zeros(1, 9), 3, True)[1].tolist() == [[0, 1, 2]]
