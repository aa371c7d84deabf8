"""The host side of the delta rule on Hopper, with a mock driver."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from helpers.hopper_kernels import addresses, delta_step, structs_of_launches, uncompiled
from minisgl.kernel.once import JitUnavailable
from minisgl_kernels import CSRC, delta_hopper
from minisgl_kernels.delta_hopper import DIM, INTERVAL, PREPARE_SHARED, SHARED, DeltaPrompts
from minisgl_kernels.hopper import SHARED_BYTES, multiply_source


@pytest.fixture
def prompts() -> DeltaPrompts:
    """As on Hopper, without one."""
    prompts = DeltaPrompts.__new__(DeltaPrompts)
    prompts._prepare, prompts._scan = (
        uncompiled("left to Triton", Mock(cubin_kernel=Mock(return_value=7))) for _ in range(2)
    )
    prompts._prepare._cubin = prompts._scan._cubin = lambda dtype: b"cubin"
    return prompts


def test_what_the_kernels_take(prompts: DeltaPrompts) -> None:
    step, sixteen = delta_step(torch.bfloat16), torch.zeros(1, 16, DIM, DIM)
    assert prompts.takes(step)
    assert prompts.takes(delta_step(torch.float16))
    assert prompts.takes(replace(step, states=sixteen, keys=sixteen[:, :2]))
    assert not prompts.takes(delta_step(torch.float32))
    assert not prompts.takes(replace(step, interval=2 * INTERVAL))
    assert not prompts.takes(replace(step, states=step.states[..., :64]))
    assert not prompts.takes(replace(step, states=step.states[:, :, :64]))
    assert not prompts.takes(replace(step, states=sixteen, keys=step.keys[:, :1]))
    assert not prompts.takes(replace(step, skip_N=torch.zeros(6)))  # Mamba2


def test_without_one_kernel_triton_has_both(prompts: DeltaPrompts) -> None:
    def cubin(dtype: torch.dtype) -> bytes:
        raise JitUnavailable("no compiler")

    prompts._scan._cubin = cubin
    assert not prompts.takes(delta_step(torch.bfloat16))


def test_the_arguments_are_the_kernels() -> None:
    source = (CSRC / "delta.cuh").read_text()
    struct = re.search(r"struct Delta \{(.*?)\n\};", source, re.DOTALL)
    assert struct
    text = re.sub(r"//.*", "", struct[1].split("__device__")[0])
    names = re.findall(r"(\w+)(?=[,;])", text)
    assert names == [name for name, _ in delta_hopper._Delta._fields_]
    assert len(names) == 22


def test_each_tensor_is_its_field(prompts: DeltaPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    parts = (prompts._prepare, prompts._scan)
    structs = [structs_of_launches(kernels, delta_hopper._Delta) for kernels in parts]
    step = delta_step(torch.bfloat16)
    tensors = addresses(step)
    assert len(tensors) == 12
    prompts.extend(step, most=5)
    for (delta,) in structs:
        assert {name: getattr(delta, name) for name in tensors} == tensors
        assert (delta.num_rows, delta.heads, delta.key_heads, delta.page_size) == (6, 6, 6, 16)
        made = {delta.inverses, delta.scores, delta.factors}
        assert len(made) == 3
        assert made.isdisjoint({0, *tensors.values()})


def test_a_block_fits() -> None:
    assert SHARED <= SHARED_BYTES
    assert 4 * (PREPARE_SHARED + 1024) <= SHARED_BYTES  # four blocks of a multiprocessor


def test_the_right_matrix_may_be_transposed() -> None:
    source = multiply_source(64, "f16", from_registers=True, name="across", transposed=True)
    assert source.startswith("__device__ void across(float (&sums)[32], const unsigned (&a)[4]")
    assert "{%32, %33, %34, %35}, %36, add, 1, 1, 1; }" in source
    assert "%36, add, 1, 1, 0; }" in multiply_source(64, "f16", from_registers=True)
