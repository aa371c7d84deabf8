"""Kernels of experts with packed weights against float64."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers.moe_cases import ACTIVATIONS, exact

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.hopper_kernels import uncompiled
from helpers.packed_forms import DTYPE, FORMS, INTERPRET, TOLERANCE, check, make
from minisgl.kernel.triton.moe import Gate
from minisgl.moe.base import Experts, SquaredRelu
from minisgl.moe.fused import gate_of
from minisgl_kernels.grouped import Task
from minisgl_kernels.hopper import Kernels, on_hopper
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.packed_grouped import PackedGrouped
from minisgl_kernels.packed_moe import PackedMoeBackend
from minisgl_kernels.packed_skinny import MAX_ROWS, PackedSkinny
from minisgl_zoo.weights.quantised import Packed


@pytest.fixture
def ops(device: torch.device) -> TunedOps:
    skinny = None if INTERPRET else on_hopper(PackedSkinny, "no skinny GEMMs")
    return TunedOps(packed_skinny=skinny)


class Stack:
    """A weight of experts as layers hold it."""

    def __init__(self, packed: Packed, values: torch.Tensor) -> None:
        self.packed_stack, self._values = packed, values

    def dense(self) -> torch.Tensor:
        return self._values


def check_experts(
    form: str,
    tokens: int,
    ops: TunedOps,
    device: torch.device,
    *,
    hidden: int = 128,
    inner: int = 128,
    grouped: PackedGrouped | None = None,
    tolerance: float = 3 * TOLERANCE,
    **kind: Any,
) -> None:
    """Two of six experts for each token; experts 1 to 4 are here."""
    rows = inner * (1 if isinstance(kind.get("activation"), SquaredRelu) else 2)
    gate_up, up_values = make((4, rows, hidden), device=device, **FORMS[form])
    down, down_values = make((4, hidden, inner), device=device, **FORMS[form])
    x = (torch.randn(tokens, hidden, device=device) / 8).to(DTYPE)
    weights = torch.rand(tokens, 2, device=device)
    ids = torch.tensor([(t % 6, (t + 1) % 6) for t in range(tokens)], dtype=torch.int32).to(device)
    stacks: Any = {"gate_up": Stack(gate_up, up_values), "down": Stack(down, down_values)}
    experts = Experts(**stacks, count=4, first=1, total=6, top_k=2, renormalise=True, **kind)
    backend = PackedMoeBackend(ops, grouped=grouped)
    got = backend.routed(x, weights, ids, experts)
    check(got, exact(x, weights, ids, experts), tolerance)
    if grouped:
        taken = grouped.experts(
            x, gate_up, down, weights, ids, experts.first, gate_of(experts), experts.gate_up_bias
        )
        assert (taken is not None) == (form in GROUPED_FORMS)
        assert torch.equal(backend.routed(x, weights, ids, experts), got)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS, 11])
def test_experts(form: str, tokens: int, ops: TunedOps, device: torch.device) -> None:
    check_experts(form, tokens, ops, device)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, MAX_ROWS, 11])
def test_experts_with_biases_and_other_activations(
    name: str, tokens: int, ops: TunedOps, device: torch.device
) -> None:
    """Kernels read the packed weights: dequantising gpt-oss's took 4 GiB more in each step."""
    activation, has_bias = ACTIVATIONS[name]
    biases: dict[str, Any] = {}
    if has_bias:
        biases["gate_up_bias"] = torch.randn(4, 256, device=device).to(DTYPE)
        biases["down_bias"] = torch.randn(4, 128, device=device).to(DTYPE)
    check_experts("MXFP4", tokens, ops, device, activation=activation, **biases)


GROUPED_FORMS = tuple(form for form in FORMS if not form.startswith("uint8"))
"""Those that `PackedGrouped` reads. It leaves uint8 to Triton."""


@pytest.fixture(scope="module")
def grouped() -> PackedGrouped:
    made = None if INTERPRET else on_hopper(PackedGrouped, "no grouped GEMMs")
    if made is None:
        pytest.skip("grouped GEMMs by packed weights are for Hopper")
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [9, 150, 1000])
def test_grouped_gemms_of_experts(
    form: str, tokens: int, device: torch.device, grouped: PackedGrouped
) -> None:
    """Tiles of one to eight columns of 16, rows of weights and inputs that do not fill a tile."""
    check_experts(
        form, tokens, TunedOps(), device,
        hidden=448, inner=320, grouped=grouped, tolerance=TOLERANCE,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-oss", "gelu"])
def test_grouped_gemms_with_biases_and_other_activations(
    name: str, device: torch.device, grouped: PackedGrouped
) -> None:
    activation, has_bias = ACTIVATIONS[name]
    biases: dict[str, Any] = {}
    if has_bias:
        biases["gate_up_bias"] = torch.randn(4, 640, device=device).to(DTYPE)
        biases["down_bias"] = torch.randn(4, 448, device=device).to(DTYPE)
    check_experts(
        "MXFP4", 200, TunedOps(), device, hidden=448, inner=320, grouped=grouped,
        tolerance=TOLERANCE, activation=activation, **biases,
    )  # fmt: skip


@pytest.mark.skipif(not INTERPRET, reason="a GPU runs the kernels themselves")
def test_what_grouped_gemms_are_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: both tasks, in order, with the memory and the blocks of a launch."""
    tasks, blocks = [], []

    def launch(kernel: int, num_blocks: int, *others: Any) -> None:
        parameters = ctypes.cast(others[3], ctypes.POINTER(ctypes.c_int64 * 2)).contents
        tasks.append(Task.from_buffer_copy(ctypes.string_at(parameters[1], ctypes.sizeof(Task))))
        blocks.append((kernel, num_blocks))

    library = Mock(kernel_launch=launch, tensor_map=lambda *numbers: bytes(128))
    grouped = PackedGrouped.__new__(PackedGrouped)
    grouped._kernels = uncompiled("", library)
    made = iter((7, 8))
    monkeypatch.setattr(Kernels, "make", lambda self, kind: next(made))
    monkeypatch.setattr(Kernels, "begin_compiling", Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", Mock(return_value=Mock(cuda_stream=0)))
    gate_up, _ = make((4, 640, 448), **FORMS["MXFP4"])
    down, _ = make((4, 448, 320), **FORMS["MXFP4"])
    ids = torch.tensor([[0, 1], [2, 5], [1, 3]], dtype=torch.int32)
    x, weights, bias = torch.zeros(3, 448).bfloat16(), torch.rand(3, 2), torch.zeros(4, 640)
    gate = Gate(alpha=1.702, limit=7.0)
    out = grouped.experts(x, gate_up, down, weights, ids, 1, gate, bias)
    assert out is not None
    assert out.shape == (6, 448)
    up, last = tasks
    assert blocks == [(7, 132), (8, 132)]
    assert [(t.inputs, t.outputs, t.width, t.groups, t.share) for t in tasks] == [
        (512, 320, 384, 14, 2), (384, 448, 448, 10, 1),
    ]  # fmt: skip
    assert (up.scales, up.bias, up.limit) == (0, bias.data_ptr(), 7.0)
    assert (last.x, last.out, last.scales) == (up.out, out.data_ptr(), weights.data_ptr())
    assert (up.scale, last.scale) == (gate_up.scale.data_ptr(), down.scale.data_ptr())
    assert grouped.experts(x.half(), gate_up, down, weights, ids, 1, gate, bias) is None
