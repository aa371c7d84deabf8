"""Which prompts the kernel for heads of 512 dims gets on Hopper, without one."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers.attention_cases import Case, make_step
from helpers.gpu_batches import make_batch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.attention import BaseAttnBackend, create_attention_backend, cuda
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.kernel.once import JitUnavailable
from minisgl.kernel.triton.launch import INTERPRET
from minisgl_kernels import hopper_backend
from minisgl_kernels.ops import TunedOps

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pretended_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRET:
        pytest.skip("a GPU has the kernel itself")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cuda, "num_cores", lambda _: 132)
    plain = TritonAttnBackend.__init__
    monkeypatch.setattr(
        TritonAttnBackend, "__init__", lambda self, ops, cores, _: plain(self, ops, cores, CPU)
    )


def create(head_dim: int) -> BaseAttnBackend:
    return create_attention_backend("triton", TunedOps(), torch.device("cuda"), head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [128, 512])
def test_the_log_says_what_is_used_where_nothing_compiles(
    head_dim: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        hopper_backend, "WideAttention", Mock(side_effect=JitUnavailable("no compiler"))
    )
    with caplog.at_level("INFO"):
        create(head_dim)
    expected = ["Triton's kernel computes prompts of wide heads: no compiler"]
    assert caplog.messages == (expected if head_dim == 512 else [])


@pytest.mark.parametrize(
    ("changes", "is_wide"),
    [({}, True), ({"window": 16}, False), ({"softcap": 20.0}, False), ({"sinks": True}, False)],
)
def test_prompts_that_nothing_bounds_have_the_kernel(
    changes: dict[str, Any], is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Mock(takes=Mock(return_value=True))
    monkeypatch.setattr(hopper_backend, "WideAttention", lambda: wide)
    case = Case(name="wide", rows=((0, 70), (3, 40)), num_q_heads=4, head_dim=512, **changes)
    backend, step = create(512), make_step(case, torch.float16, "torch")
    backend.forward(step.q, step.k, step.v, step.layer, make_batch(step, backend, CPU))
    assert wide.extend.called == is_wide
    if is_wide:
        assert wide.extend.call_args.kwargs["num_tokens"] == 70 + 37
