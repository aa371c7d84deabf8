"""The gated delta rule of prompts on Hopper, against the reference. Two cases are Triton's, so that
the interpreter runs them."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.delta_prompts import Prompts, Span
from helpers.recurrent_steps import check_backend
from minisgl.kernel.once import JitUnavailable
from minisgl.kernel.ops import Ops
from minisgl_kernels import hopper as kernels
from minisgl_kernels.delta_hopper import DIM, INTERVAL, DeltaPrompts
from minisgl_kernels.recurrent import TritonRecurrentBackend
from minisgl_zoo.recurrent.backend import create_recurrent_backend

TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-9}
STATE_TOLERANCE = 2**-9  # products of float16, which is rounded
TRITONS_STATE_TOLERANCE = 2**-8  # products of tf32, which is cut off, in a chain: 2.1e-3 on an H200
FRESH: list[list[Span]] = [[(0, 1)], [(0, 20)], [(0, 64)], [(0, 1000), (0, 64), (0, 130)]]
CASES: list[list[list[Span]]] = [
    *([spans] for spans in FRESH),
    [[(0, 70), (0, 128), (0, 130)], [(70, 100), (128, 256), (130, 700)]],
    [[(0, 1), (0, 63)], [(1, 63), (63, 64)], [(63, 65), (64, 64)], [(65, 200), (64, 129)]],
]


@pytest.fixture(scope="module")
def hopper(device: torch.device) -> DeltaPrompts:
    if device.type != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for Hopper")
    return DeltaPrompts()


def _close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    assert ours.isfinite().all()
    error = (ours.float() - exact).abs().max() / exact.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


def _check(prompts: Prompts, steps: list[list[Span]], scan: DeltaPrompts | None) -> None:
    """Compare outputs of all steps, states and updates; no other place may be written."""
    last = steps[-1]
    hidden = max(end for _, end in last) - 2
    outputs: list[list[Tensor]] = [[] for _ in last]
    for spans in steps:
        found = prompts.step(spans, scan, [hidden] if spans is last else ())
        for parts, out in zip(outputs, found, strict=True):
            parts.append(out)
    written = torch.zeros(len(prompts.updates), dtype=torch.bool, device=prompts.device)
    stored = torch.zeros(len(prompts.states), dtype=torch.bool, device=prompts.device)
    tolerance = TOLERANCE.get(prompts.mixed[0].dtype, 2e-5)
    of_states = min(STATE_TOLERANCE if scan else TRITONS_STATE_TOLERANCE, tolerance)
    for prompt, parts in enumerate(outputs):
        exact, states, updates = prompts.reference(prompt)
        _close(torch.cat(parts), exact, tolerance)
        for spans in steps:
            start, end = spans[prompt]
            newest = end // INTERVAL * INTERVAL
            if newest > start // INTERVAL * INTERVAL:
                _close(prompts.state(prompt, newest), states[newest // INTERVAL - 1], of_states)
                stored[prompts.state_table[prompt, newest // prompts.page_size - 1].long()] = True
            kept = torch.arange(max(start, newest), end)
            if spans is last:
                kept = kept[kept != hidden]
            written[prompts.slots(prompt, kept)] = True
            if spans is last and len(kept):
                exact = updates[(kept - newest).to(prompts.device)]
                _close(prompts.updates[prompts.slots(prompt, kept)], exact, of_states)
    assert torch.equal(~prompts.updates.isnan().flatten(1).all(1), written)
    assert torch.equal(~prompts.states.isnan().flatten(1).all(1), stored)


def _lengths(steps: list[list[Span]]) -> list[int]:
    return [end for _, end in steps[-1]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "page_size"), [((4, 2), 16), ((3, 3), 64), ((8, 2), 1)], ids=str)
@pytest.mark.parametrize("steps", CASES, ids=lambda steps: str(steps[-1]))
def test_prompts_are_the_reference(
    steps: list[list[Span]],
    heads: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    hopper: DeltaPrompts,
) -> None:
    prompts = Prompts(_lengths(steps), heads, dtype, device, page_size=page_size)
    _check(prompts, steps, hopper)


@pytest.mark.parametrize("steps", CASES[-2:], ids=lambda steps: str(steps[-1]))
def test_tritons_prompts_are_the_reference(steps: list[list[Span]], device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    _check(Prompts(_lengths(steps), (2, 1), dtype, device), steps, None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_steps_with_decode_rows(
    page_size: int, dtype: torch.dtype, device: torch.device, hopper: DeltaPrompts
) -> None:
    make = partial(TritonRecurrentBackend, hopper=(None, hopper))
    check_backend(
        make, (4, 2), (DIM, DIM), 4, page_size, dtype, 2**-6, device, is_mamba=False
    )  # fmt: skip


def test_a_prompt_in_chunks_is_the_whole(device: torch.device, hopper: DeltaPrompts) -> None:
    """Bit for bit if they end where an interval ends."""
    make = partial(Prompts, [1000], (4, 2), torch.bfloat16, device)
    whole = make().step([(0, 1000)], hopper)[0]
    for middle in (320, 300):
        prompts = make()
        parts = [prompts.step([span], hopper)[0] for span in ((0, middle), (middle, 1000))]
        if middle % INTERVAL == 0:
            assert torch.equal(torch.cat(parts), whole)
        _close(torch.cat(parts), whole.float(), 2**-7)


def test_a_prompt_is_the_same_beside_others(device: torch.device, hopper: DeltaPrompts) -> None:
    spans = [(0, 700), (0, 64), (0, 333)]
    together = Prompts([700, 64, 333], (4, 2), torch.bfloat16, device)
    alone = Prompts([700, 64, 333], (4, 2), torch.bfloat16, device)
    outputs = together.step(spans, hopper)
    for i, out in enumerate(outputs):
        span = [x if i == j else (0, 0) for j, x in enumerate(spans)]
        assert torch.equal(alone.step(span, hopper)[i], out)


def test_values_too_large_for_float16_are_not_hidden(
    device: torch.device, hopper: DeltaPrompts
) -> None:
    prompts = Prompts([200], (2, 1), torch.bfloat16, device)
    prompts.mixed[0][70, -1] = 1e6
    prompts.beta[0][70] = 1.0
    out = prompts.step([(0, 200)], hopper)[0]
    assert out[:64].isfinite().all()
    assert not out[128:, 1, -1].isfinite().any()
    assert out[:, 0].isfinite().all()


def test_where_nothing_compiles_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch, "zeros", Mock())
    monkeypatch.setattr(kernels, "load_library", Mock(side_effect=JitUnavailable("no compiler")))
    with caplog.at_level("INFO"):
        made = create_recurrent_backend(
            "triton", Ops(), torch.device("cuda"), 16, torch.empty(1, 4)
        )
    assert isinstance(made, TritonRecurrentBackend)
    assert (made._decode, made._prompts) == (None, None)
    assert caplog.messages == ["Triton computes the delta rule: no compiler"]
