"""GPUs counted without torch, with a fake driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from minisgl.utils import gpus


class Nvml:
    """Of a machine with four GPUs."""

    def __init__(self, error: int = 0) -> None:
        self._error = error

    def nvmlInit_v2(self) -> int:
        return self._error

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 4
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("1", 1),
        ("0, 3,1", 3),
        ("0,9,1", 1),
        ("GPU-8932f937,GPU-1a", 2),
        ("MIG-1,MIG-2,MIG-3,MIG-4,MIG-5", 5),
        ("NoDevFiles", 0),
    ],
)
def test_cuda_visible_devices_limits_the_count(
    machine: pytest.MonkeyPatch, visible: str | None, expected: int
) -> None:
    if visible is not None:
        machine.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.gpus_of_driver() == expected


def test_there_is_no_gpu_without_a_driver(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(ctypes, "CDLL", lambda name: Nvml(error=9))
    assert gpus.gpus_of_driver() == 0

    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    machine.setattr(ctypes, "CDLL", missing)
    assert gpus.gpus_of_driver() == 0
