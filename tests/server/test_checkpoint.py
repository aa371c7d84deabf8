"""The supervisor's checks of a checkpoint and its ranks, without a process or a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from minisgl.errors import ConfigError
from minisgl.runtime.check_ranks import check_ranks
from minisgl.server.args import ServerArgs
from minisgl.server.checkpoint import find_checkpoint


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two."""
    monkeypatch.setattr("minisgl.runtime.check_ranks.num_gpus", lambda: 2)


def check(folder: Path, config: dict[str, Any], **args: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    check_ranks(folder, ServerArgs(**args))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(("tp", "nnodes"), [(3, 1), (6, 2)])
def test_more_ranks_than_gpus(tmp_path: Path, device: str, tp: int, nnodes: int) -> None:
    with pytest.raises(ConfigError) as raised:
        check(tmp_path, {}, device=device, tp=tp, nnodes=nnodes)
    assert str(raised.value) == (
        "3 ranks on this machine need a GPU each, but torch finds 2; lower --tp, spread the ranks "
        "with --nnodes, look at CUDA_VISIBLE_DEVICES, or say --device cpu"
    )


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "args",
    [{"tp": 2}, {"tp": 4, "nnodes": 2, "device": "cuda"}, {"tp": 3, "device": "cpu"}],
)
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
    ],
)
def test_ranks_without_a_head_or_an_expert(
    tmp_path: Path, config: dict[str, Any], tp: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(tmp_path, config, tp=tp, ep=True, device="cpu")


@pytest.mark.parametrize(
    "config",
    [{"num_experts": 2}, {"num_experts_per_tok": 2}, {"num_experts": "two"}, {"num_experts": None}],
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
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("minisgl.utils.hub.why_offline", lambda: "")
    found = find_checkpoint(ServerArgs(model="org/name", dummy_weight=dummy))
    assert (found.folder, found.names) == (tmp_path, ("org/name",))
