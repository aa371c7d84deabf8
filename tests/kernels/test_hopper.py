"""The host side that our GEMMs on Hopper share, with a mock driver."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers.hopper_kernels import uncompiled
from minisgl.kernel.once import JitUnavailable
from minisgl_kernels import grouped
from minisgl_kernels.hopper import SHARED_BYTES, on_hopper


def test_a_kernel_is_made_once_and_may_use_a_blocks_memory() -> None:
    library = Mock(cubin_load=Mock(return_value=5), cubin_kernel=Mock(return_value=7))
    kernels = uncompiled("", library)
    assert [kernels.get(b"kind") for _ in range(2)] == [7, 7]
    library.cubin_load.assert_called_once_with(b"kind")
    library.cubin_kernel.assert_called_once_with(5, "gemm")
    library.kernel_allow.assert_called_once_with(7, SHARED_BYTES)
    library.kernel_prefer_shared.assert_not_called()


def test_a_kernel_may_prefer_shared_memory() -> None:
    library = Mock(cubin_kernel=Mock(return_value=7))
    kernels = uncompiled("", library)
    kernels._prefer_shared = True
    assert kernels.get(b"kind") == 7
    library.kernel_prefer_shared.assert_called_once_with(7)


def test_a_kernel_is_compiled_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def cubin(kind: bytes) -> bytes:
        has_begun.set()
        assert may_end.wait(60)
        raise JitUnavailable("no compiler")

    kernels = uncompiled("left to Triton", Mock())
    kernels._cubin = cubin
    kernels.begin_compiling(b"kind")
    assert has_begun.wait(60)
    assert not caplog.text
    may_end.set()
    assert kernels.get(b"kind") is None  # and its warning is logged
    assert "left to Triton: no compiler" in caplog.text


def test_two_kernels_are_compiled_at_the_same_time() -> None:
    together, compiled = threading.Barrier(2, timeout=60), set[bytes]()

    def cubin(kind: bytes) -> bytes:
        if kind not in compiled:  # else it is cached
            compiled.add(kind)
            together.wait()
        return kind

    kernels = uncompiled("", Mock(cubin_kernel=Mock(return_value=7)))
    kernels._cubin = cubin
    assert kernels.get_all((b"up", b"down"))
    assert kernels._made == {b"up": 7, b"down": 7}


@pytest.mark.parametrize(
    ("dtype", "begun"),
    [
        (torch.float16, [(torch.float16, "silu"), (torch.float16, None)]),
        (torch.float32, []),  # which they do not take
    ],
)
def test_grouped_gemms_are_compiled_for_their_dtype(
    dtype: torch.dtype, begun: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Mock()
    monkeypatch.setattr(grouped, "Kernels", Mock(return_value=kernels))
    monkeypatch.setattr(torch.cuda, "get_device_properties", Mock())
    grouped.GroupedGemms(dtype)
    assert [call.args[0] for call in kernels.begin_compiling.call_args_list] == begun


def test_a_kernel_gets_the_addresses_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def launch(*numbers: Any) -> None:
        addresses = (ctypes.c_int64 * 3).from_address(numbers[5])
        launches.append((*numbers[:5], list(addresses), *numbers[6:]))

    kernels = uncompiled("", SimpleNamespace(kernel_launch=launch))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=9))
    kernels.launch(7, 132, 384, 1024, 11, 12, 13, cluster=2)
    assert launches == [(7, 132, 384, 1024, 2, [11, 12, 13], True, 9)]


def test_weights_are_described_once_for_each_size_of_a_copy() -> None:
    library = Mock(tensor_map=lambda *numbers: bytes(numbers))
    kernels = uncompiled("", library)
    first = kernels.weight_map(1, 2, 3, 4)
    assert first == bytes((1, 2, 3, 4, 2, 64))
    assert kernels.weight_map(1, 2, 3, 4) is first
    assert kernels.weight_map(1, 2, 3, 8) == bytes((1, 2, 3, 8, 2, 64))
    assert kernels.weight_map(1, 2, 3, 4, itemsize=1) == bytes((1, 2, 3, 4, 1, 64))
    assert kernels.weight_map(1, 2, 3, 4, 8, 192) == bytes((1, 2, 3, 4, 8, 192))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_other_gpus_make_nothing(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    make = Mock(return_value="gemms")
    assert on_hopper(make, "") == ("gemms" if capability[0] == 9 else None)
    assert make.called == (capability[0] == 9)


@pytest.mark.parametrize("error", [JitUnavailable("no compiler"), RuntimeError("no driver")])
def test_where_nothing_compiles_the_log_says_what_is_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with caplog.at_level("INFO"):
        assert on_hopper(Mock(side_effect=error), "left to cuBLAS") is None
    assert f"left to cuBLAS: {error}" in caplog.text
