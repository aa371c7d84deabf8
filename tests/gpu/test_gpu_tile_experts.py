"""Experts of GGUF files that stay packed on a GPU, beside float64.

Planted once, and noticed: the next expert's tiles, a chunk's pairs shifted by one, weights of
another pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.gguf_blocks import draw
from helpers.moe_cases import ACTIVATIONS, TOLERANCE, exact
from minisgl.moe import Experts, SquaredRelu, create_moe_backend
from minisgl.quantization import PlainWeight, Weight
from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import WeightBuild
from minisgl_kernels import tile_moe, tiles
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.tile_moe import MOST_PAIRS, UNGROUPED, TileMoeBackend
from minisgl_zoo.gguf.tile_weight import TileWeight
from minisgl_zoo.gguf.tiles import TILE_FORMS
from minisgl_zoo.gguf.weight import FileTypes

BF16 = torch.bfloat16
HELD, FIRST, TOTAL, TOP_K = 4, 1, 6, 2
MANY = MOST_PAIRS * TOTAL // TOP_K + 1
"""Tokens, of which so many experts are dequantised."""
TOKENS = (1, UNGROUPED, UNGROUPED + 1, 30, 100, MANY)


@dataclass
class Values:
    """A weight that is only its values."""

    values: torch.Tensor

    def dense(self) -> torch.Tensor:
        return self.values


@dataclass
class Case:
    experts: Experts
    true: Experts
    """The same, with the values of the file."""
    backend: TileMoeBackend

    def check(self, tokens: int, device: torch.device) -> torch.Tensor:
        x, weights, ids = inputs(tokens, self.experts.down.shape[1], device)
        got = self.backend.routed(x, weights, ids, self.experts)
        true = self.true
        if tokens >= MANY:
            rounded: Any = {
                name: Values(getattr(true, name).dense().to(BF16)) for name in ("gate_up", "down")
            }
            true = replace(true, **rounded)
        want = exact(x, weights, ids, true)
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error <= TOLERANCE[BF16], error
        return got


def inputs(tokens: int, hidden: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, routing weights, ids: more pairs of some experts than of others, one of none."""
    torch.manual_seed(tokens)
    x = (torch.randn(tokens, hidden, device=device) / 16).to(BF16)
    others = torch.tensor([0, 1, 1, 2, 4, 5])[torch.arange(tokens) % 7 % 6]
    ids = torch.stack((others, (others + 1 + torch.arange(tokens) % 2) % TOTAL), 1)
    ids[ids == 3] = 0
    ids[(ids[:, 0] == ids[:, 1]), 1] = 4
    weights = torch.rand(tokens, TOP_K, device=device)
    return x, weights / weights.sum(-1, keepdim=True), ids.int().to(device)


def stack(kind: str, shape: tuple[int, int], parts: int, device: torch.device) -> tuple[Any, Any]:
    """Return a stack as the loader fills it, and its values. parts: of each expert's matrix."""
    names = [f"m.experts.{expert}.{part}" for expert in range(HELD) for part in range(parts)]
    types = FileTypes(types={f"m.experts.{part}": kind for part in (*range(parts), "other")})
    rows = shape[0] // parts
    build = WeightBuild(
        ops=TunedOps(), dtype=BF16, stacked=HELD,
        parts=[Part.whole(f"{name}.weight", rows, shape[1]) for name in names],
    )  # fmt: skip
    weight = types(build)
    assert isinstance(weight, TileWeight), types.why_dequantised(build)
    blocks, values = draw(kind, sum(shape), (HELD, *shape))
    next(weight.parameters()).set(blocks.to(device))
    weight.init_buffers(device)
    return weight, values.double().to(device)


def make(
    kind: str, device: torch.device, *, hidden: int = 512, inner: int = 256, down: str = "",
    **more: Any,
) -> Case:  # fmt: skip
    parts = 1 if isinstance(more.get("activation"), SquaredRelu) else 2
    gate_up, up_values = stack(kind, (parts * inner, hidden), parts, device)
    lower, down_values = stack(down or kind, (hidden, inner), 1, device)
    stacks: Any = {"gate_up": gate_up, "down": lower}
    sizes = {"count": HELD, "first": FIRST, "total": TOTAL, "top_k": TOP_K, "renormalise": True}
    experts = Experts(**stacks, **sizes, **more)
    true: Any = {"gate_up": Values(up_values), "down": Values(down_values)}
    backend = create_moe_backend(TunedOps(), BF16, type(gate_up))
    assert isinstance(backend, TileMoeBackend)
    return Case(experts, replace(experts, **true), backend)


@pytest.mark.parametrize("kind", TILE_FORMS)
def test_experts(kind: str, device: torch.device) -> None:
    case = make(kind, device)
    for tokens in TOKENS:
        case.check(tokens, device)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_other_activations_and_biases(name: str, device: torch.device) -> None:
    activation, has_bias = ACTIVATIONS[name]
    biases: dict[str, Any] = {}
    if has_bias:
        biases["gate_up_bias"] = torch.randn(HELD, 512, device=device).to(BF16)
        biases["down_bias"] = torch.randn(HELD, 512, device=device).to(BF16)
    case = make("Q4_K", device, down="Q6_K", activation=activation, **biases)
    for tokens in TOKENS:
        case.check(tokens, device)


def test_inputs_that_end_within_a_warps_share(device: torch.device) -> None:
    """1,472 and 448 inputs are no multiples of 256, and 1,472 outputs none of 64."""
    case = make("Q8_0", device, hidden=1472, inner=448, down="Q5_0")
    for tokens in TOKENS:
        case.check(tokens, device)


def test_routing_is_that_of_other_experts(device: torch.device) -> None:
    case = make("Q4_K", device)
    x = inputs(30, 512, device)[0]
    logits = torch.randn(30, TOTAL, device=device).to(BF16)
    weights, ids = case.backend.ops.route(logits, TOP_K, True)
    want = case.backend.routed(x, weights, ids, case.experts)
    assert torch.equal(case.backend.forward(x, logits, case.experts), want)


def test_a_token_comes_out_the_same_beside_any_others(device: torch.device) -> None:
    case = make("Q4_K", device, down="Q6_K")
    x, weights, ids = inputs(100, 512, device)
    whole = case.backend.routed(x, weights, ids, case.experts)
    for first, last in ((0, 1), (17, 18), (3, 7), (60, 99)):
        some = slice(first, last)
        got = case.backend.routed(x[some], weights[some], ids[some].contiguous(), case.experts)
        assert torch.equal(got, whole[some])


def test_a_few_experts_are_dequantised_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make("Q4_K", device)
    whole = case.check(MANY, device)
    monkeypatch.setattr(tile_moe, "DENSE_NUMBERS", 3 * 512 * 512)  # three experts, then one
    assert torch.equal(case.check(MANY, device), whole)


def test_a_kernel_that_cannot_be_made(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make("Q4_K", device)
    monkeypatch.setattr(tiles._kernels("tiles_few"), "get", lambda numbers: None)
    for tokens in TOKENS:
        case.check(tokens, device)


def test_one_of_two_stacks_is_dequantised(device: torch.device) -> None:
    """As a rank's share of down that cuts blocks. With a bias it is added once."""
    bias = torch.randn(HELD, 512, device=device).to(BF16)
    case = make("Q4_K", device, down_bias=bias)
    plain: Weight = PlainWeight.of(TunedOps(), case.experts.down.dense())
    case.experts = replace(case.experts, down=plain)
    for tokens in TOKENS:
        x, weights, ids = inputs(tokens, 512, device)
        got = case.backend.routed(x, weights, ids, case.experts)
        want = exact(x, weights, ids, case.true)
        assert (got.double() - want).abs().max() / want.abs().max() <= 2 * TOLERANCE[BF16]


def test_experts_are_captured(device: torch.device) -> None:
    case = make("Q4_K", device, down="Q6_K")
    for tokens in (1, 30, MANY):
        x, weights, ids = inputs(tokens, 512, device)
        case.backend.routed(x, weights, ids, case.experts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = case.backend.routed(x, weights, ids, case.experts)
        other = inputs(tokens + 1, 512, device)
        for to, new in zip((x, weights, ids), other, strict=True):
            to.copy_(new[1:])
        graph.replay()
        assert torch.equal(y, case.backend.routed(x, weights, ids, case.experts))
