"""The fused experts against float64, over a table of shapes; in graphs; and whole models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers.moe_cases import ACTIVATIONS, TOLERANCE, exact, make_case, tiny_config

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.cuda import CudaOps
from minisgl.kernel.ops import Ops
from minisgl.moe import TorchMoeBackend
from minisgl.moe.fused import FusedMoeBackend
from minisgl_kernels import moe
from minisgl_kernels.grouped import GroupedGemms
from minisgl_kernels.moe import TunedMoeBackend
from minisgl_kernels.ops import TunedOps

REFERENCE = Ops()

# tokens, experts, top_k, hidden, inner, first expert held, experts held (None: all)
TABLE = [
    (1, 8, 2, 64, 128, 0, None),
    (2, 128, 8, 2048, 768, 0, None),
    (3, 60, 4, 72, 40, 0, None),
    (7, 8, 1, 33, 50, 0, None),
    (16, 128, 8, 256, 96, 0, None),
    (33, 16, 3, 80, 72, 4, 5),
    (64, 128, 8, 2048, 768, 0, None),
    (129, 64, 6, 130, 66, 32, 32),
    (200, 8, 8, 512, 192, 0, None),
    (512, 8, 2, 4096, 192, 0, None),
    (1000, 128, 8, 2048, 384, 64, 64),
    (2048, 32, 4, 1024, 256, 0, None),
    (8192, 128, 8, 256, 192, 0, None),
    (8192, 8, 1, 128, 64, 0, None),
]
OTHER_ACTIVATIONS = [(2, 9, 2, 72, 40, 0, None), *TABLE[2:4], TABLE[5], TABLE[7], TABLE[8]]


@pytest.fixture(params=["core", "triton", "hopper"])
def backend(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> FusedMoeBackend:
    """core: without GEMVs for few tokens. hopper: with the GEMMs for Hopper for any number of
    pairs."""
    if request.param == "core":
        return FusedMoeBackend(CudaOps())
    if request.param == "triton":
        return TunedMoeBackend(TunedOps())
    if device.type == "cpu" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for Hopper")
    monkeypatch.setattr(moe, "FEWEST_GROUPED", 0)
    return TunedMoeBackend(TunedOps(), GroupedGemms(torch.bfloat16))


def _skip_what_the_interpreter_cannot(dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton 3.6's interpreter gets tl.dot of bfloat16 wrong")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_experts_match_float64(
    case: tuple[int, int, int, int, int, int, int | None],
    dtype: torch.dtype,
    device: torch.device,
    backend: FusedMoeBackend,
) -> None:
    _skip_what_the_interpreter_cannot(dtype, device)
    x, logits, experts = make_case(*case, dtype=dtype, device=device)
    weights, ids = REFERENCE.route(logits, experts.top_k, experts.renormalise)
    want = exact(x, weights, ids, experts)
    for got in (backend.forward(x, logits, experts), backend.routed(x, weights, ids, experts)):
        assert got.dtype == dtype
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("case", OTHER_ACTIVATIONS, ids=str)
def test_other_activations_match_float64(
    case: tuple[int, int, int, int, int, int, int | None],
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    backend: FusedMoeBackend,
) -> None:
    _skip_what_the_interpreter_cannot(dtype, device)
    activation, bias = ACTIVATIONS[name]
    x, logits, experts = make_case(
        *case, activation=activation, bias=bias, dtype=dtype, device=device
    )
    weights, ids = REFERENCE.route(logits, experts.top_k, experts.renormalise)
    want = exact(x, weights, ids, experts)
    got = backend.forward(x, logits, experts)
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error <= 1.5 * TOLERANCE[dtype], f"relative error {error:.2e}"  # more steps are rounded


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 1), (5, 60, 4), (300, 128, 8)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routing(
    tokens: int,
    experts: int,
    top_k: int,
    renormalise: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(tokens)
    logits = (torch.randn(tokens, experts, device=device) * 3).to(dtype)
    logits[0] = 1.5  # all equal: the first ones
    weights, ids = TunedOps().route(logits, top_k, renormalise)
    want_weights, want_ids = REFERENCE.route(logits, top_k, renormalise)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 40])
def test_an_expert_may_have_a_scale(
    tokens: int, device: torch.device, backend: FusedMoeBackend
) -> None:
    kind = torch.float32
    x, logits, experts = make_case(tokens, 12, 3, 64, 64, dtype=kind, device=device)
    experts = dataclasses.replace(experts, scale=torch.rand(12, device=device) + 0.5)
    got = backend.forward(x, logits, experts)
    want = TorchMoeBackend(REFERENCE).forward(x, logits, experts)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_routing_of_nonsense_stays_in_range(device: torch.device) -> None:
    logits = torch.full((3, 60), torch.nan, device=device)
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    ids = TunedOps().route(logits, 4, True)[1].tolist()
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 60 for row in ids)


def test_all_tokens_may_choose_one_expert(device: torch.device, backend: FusedMoeBackend) -> None:
    _skip_what_the_interpreter_cannot(torch.bfloat16, device)
    x, logits, experts = make_case(700, 128, 2, 128, 64, dtype=torch.bfloat16, device=device)
    logits[:, 127] = 9
    logits[:, 3] = 8
    weights, ids = REFERENCE.route(logits, 2, True)
    got, want = backend.forward(x, logits, experts), exact(x, weights, ids, experts)
    assert (got.double() - want).abs().max() / want.abs().max() <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
def test_replays_of_a_graph_follow_their_inputs(
    tokens: int, device: torch.device, backend: FusedMoeBackend
) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter has no CUDA graphs")
    with torch.inference_mode():
        x, logits, experts = make_case(tokens, 128, 8, 256, 64, dtype=torch.bfloat16, device=device)
        backend.forward(x, logits, experts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.forward(x, logits, experts)
        for seed in range(3):
            torch.manual_seed(seed)
            x.normal_()
            logits.normal_()
            graph.replay()
            # Bit for bit, though pairs are placed in any order.
            assert torch.equal(out, backend.forward(x, logits, experts))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mixtral"])
@pytest.mark.parametrize("graphs", [0, 8])
def test_tokens_equal_transformers(family: str, graphs: int, tmp_path: Path) -> None:
    from helpers.engine_runs import drive, greedy, prompts
    from helpers.model_harness import make_reference
    from minisgl.engine import EngineConfig
    from minisgl.engine.startup import start_engine

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = make_reference(tiny_config(family))
    model.save_pretrained(tmp_path)
    engine = start_engine(
        EngineConfig(
            model=str(tmp_path),
            device="cuda",
            num_pages=256,
            max_running_requests=16,
            max_prefill_length=64,
            cuda_graph_max_bs=graphs,
        )
    )
    try:
        got = drive(engine, [(prompt, greedy()) for prompt in prompts(4)])
    finally:
        engine.close()
    for prompt, ids in zip(prompts(4), got, strict=True):
        want = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=len(ids),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ids == want[0, len(prompt) :].tolist()
