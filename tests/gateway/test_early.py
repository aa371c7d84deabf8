"""The supervisor's checks of a checkpoint and its ranks, without a process or a GPU."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from minisgl.builtin import model_path
from minisgl.errors import CheckpointError, ConfigError
from minisgl.server.args import ServerArgs
from minisgl.server.model import find_model
from minisgl_gateway import early
from minisgl_gateway.early import check_context, check_ranks


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two."""
    monkeypatch.setattr("minisgl_gateway.early.num_gpus", lambda: 2)


def check(folder: Path, config: dict[str, Any], **args: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    check_ranks(folder, ServerArgs(**args))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(tmp_path, {}, device=device, tp=3)
    assert str(raised.value) == (
        "3 ranks on this machine need a GPU each, but torch finds 2; lower --tp, spread the ranks "
        "with --nnodes, look at CUDA_VISIBLE_DEVICES, or say --device cpu"
    )


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("args", [{"tp": 2}, {"tp": 3, "device": "cpu"}])
def test_ranks_with_enough_gpus(tmp_path: Path, args: dict[str, Any]) -> None:
    check(tmp_path, {}, **args)


@pytest.mark.parametrize(
    ("config", "tp", "says"),
    [
        ({"num_attention_heads": 2}, 3, "--tp 3 needs a query head for each rank, .* has 2; use"),
        ({"num_experts": 2}, 3, "--ep needs an expert for each of the --tp 3 ranks, .* has 2; le"),
        ({"num_local_experts": 1, "num_experts": 8}, 2, "the model has 1; leave --ep out"),
        ({"hidden_size": 2}, 2, r"config\.json names none; leave it out"),
        ({"hidden_size": 2}, 1, r"config\.json names none; leave it out"),
        ({"text_config": {"num_experts": 1}}, 2, "the model has 1; leave --ep out"),
        ({"text_config": {"num_attention_heads": 2}}, 3, "needs a query head .* has 2; use"),
    ],
)
def test_ranks_without_a_head_or_an_expert(
    tmp_path: Path, config: dict[str, Any], tp: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(tmp_path, config, tp=tp, ep=True, device="cpu")


@pytest.mark.parametrize(
    "config",
    [
        *({"num_experts": 2}, {"num_experts": "two"}, {"num_experts": None}),
        *({"num_experts_per_tok": 2}, {"text_config": {"num_experts": 2}}),
    ],
)
def test_enough_experts(tmp_path: Path, config: dict[str, Any]) -> None:
    check(tmp_path, config, tp=2, ep=True, device="cpu")


@pytest.mark.parametrize("dummy", [False, True])
def test_random_weights_are_not_downloaded(
    dummy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(model: str, allow_patterns: list[str], **options: Any) -> str:
        assert ("*.safetensors" in allow_patterns) != dummy
        if not dummy:
            (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("minisgl.utils.hub.why_offline", lambda: "")
    found = find_model(ServerArgs(model="org/name", dummy_weight=dummy))
    assert (found.folder, found.names) == (tmp_path, ("org/name",))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_position_embeddings": 100}, "--max-seq-len 101 exceeds the 100 tokens that the mod"),
        ({"text_config": {"max_position_embeddings": 100}}, "exceeds the 100 tokens"),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "llama3"}}, "the 100 tok"),
        ({"max_position_embeddings": 101}, None),
        ({"max_position_embeddings": 10, "rope_scaling": {"type": "linear", "factor": 8}}, None),
        ({"max_position_embeddings": 9, "rope_parameters": {"full": {"rope_type": "yarn"}}}, None),
        ({}, None),
    ],
)
def test_a_context_beyond_the_models(
    tmp_path: Path, config: dict[str, Any], says: str | None
) -> None:
    """The engine refused it, after 46 s."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ServerArgs(max_seq_len=101)
    if says is None:
        check_context(tmp_path, args)
        return
    with pytest.raises(ConfigError, match=says):
        check_context(tmp_path, args)


def test_no_gpu_is_noticed_before_the_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, after 39 s, by the engine."""
    monkeypatch.setattr("minisgl_gateway.early.has_no_gpu", lambda: True)
    monkeypatch.setattr("minisgl.server.model.resolve_checkpoint", None)
    with pytest.raises(ConfigError, match="--device cuda: torch finds no CUDA device here"):
        find_model(ServerArgs(model="org/name", device="cuda"))


@pytest.mark.parametrize(
    ("build", "libraries", "driver", "answer"),
    [
        ("2.13.0+cpu", ("libnvidia-ml.so.1", "libcuda.so.1"), 1, True),
        ("2.13.0", (), 0, True),
        ("2.13.0", ("libnvidia-ml.so.1", "libcuda.so.1"), 0, True),
        ("2.13.0", ("libnvidia-ml.so.1", "libcuda.so.1"), 1, False),
        ("2.13.0", ("libcuda.so.1",), 0, False),  # a driver without NVML: not known
        ("2.13.0+rocm7.1", (), 0, False),
    ],
)
def test_only_a_machine_that_surely_has_no_gpu_is_refused(
    build: str,
    libraries: tuple[str, ...],
    driver: int,
    answer: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early, "version", lambda name: build)
    monkeypatch.setattr(early, "_loads", libraries.__contains__)
    monkeypatch.setattr(early, "gpus_of_driver", lambda: driver)
    assert early.has_no_gpu() is answer


def test_weights_that_are_cut_off_or_missing_are_noticed_at_the_door(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    find_model(ServerArgs(model=str(folder)))
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete"):
        find_model(ServerArgs(model=str(folder)))
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        find_model(ServerArgs(model=str(folder)))
    for args in ({"dummy_weight": True}, {"dry_run": True}):
        find_model(ServerArgs(model=str(folder), **args))


def test_torch_for_cpus_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "gpus_of_driver", lambda: 4)
    monkeypatch.setattr(early, "version", lambda package: "2.11.0")
    assert early.num_gpus() == 4
    monkeypatch.setattr(early, "version", lambda package: "2.11.0+cpu")
    assert early.num_gpus() == 0
