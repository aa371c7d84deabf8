"""What a GPU must be, on a machine without one."""

from __future__ import annotations

import pytest
import torch

from minisgl.engine.cuda import CudaDevice
from minisgl.errors import ConfigError


def test_a_gpu_older_than_ampere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(ConfigError) as raised:
        CudaDevice()
    assert str(raised.value) == (
        "--device cuda: Tesla T4 is of compute capability 7.5, and the kernels need 8.0 (Ampere) "
        "or later; --device cpu runs without"
    )
