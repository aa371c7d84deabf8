"""Which device `--device auto` takes."""

from __future__ import annotations

import pytest
import torch

from minisgl.engine import connect
from minisgl.engine.cpu import CpuDevice
from minisgl.errors import ConfigError
from minisgl.utils import gpus


@pytest.mark.parametrize(
    ("name", "index", "num_gpus", "is_told"),
    [("auto", 0, 2, True), ("auto", 0, 0, False), ("auto", 1, 2, False), ("cpu", 0, 2, False)],
)
def test_a_torch_that_finds_no_gpu_is_reported_where_there_is_one(
    name: str,
    index: int,
    num_gpus: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpus, "gpus_of_driver", lambda: num_gpus)
    assert isinstance(connect.create_device(name, index, 2), CpuDevice)
    told = "computing on the CPU: this machine's driver has 2 GPUs, but torch"
    assert (told in caplog.text) == is_told


def test_threads_are_for_a_cpu() -> None:
    with pytest.raises(ConfigError, match="--threads 2 is for steps on a CPU"):
        connect.create_device("cuda", 0, 1, 2)
