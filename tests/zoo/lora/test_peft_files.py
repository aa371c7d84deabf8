"""What is read of an adapter's files, and what is refused by name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_whole
from safetensors.torch import load_file, save_file

from helpers.adapters import RandomAdapter
from minisgl.errors import CheckpointError, ConfigError
from minisgl_zoo.lora.peft import digest_of, open_adapter, read_adapter

SHAPES = {
    f"model.layers.{layer}.{name}": (16, 8)
    for layer in range(2)
    for name in ("self_attn.q_proj", "mlp.up_proj")
}
PEFT_0_21: dict[str, Any] = {
    "alora_invocation_tokens": None, "arrow_config": None, "corda_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
    "base_model_name_or_path": "org/base", "ensure_weight_tying": False, "eva_config": None,
    "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": [0, 1], "loftq_config": {}, "lora_bias": False,
    "lora_dropout": 0.05, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_version": "0.21.2", "qalora_group_size": 16, "revision": None,
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
    "velora_config": None,
}  # fmt: skip
"""The other fields that PEFT 0.21.2 writes."""


def make(folder: Path, **config: Any) -> Path:
    return RandomAdapter(folder, SHAPES, seed=1, **config).folder


def change(folder: Path, **fields: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    file = open_adapter(make(tmp_path, rank=4, alpha=6, **PEFT_0_21))
    assert file.rank == 4
    assert file.inputs == dict.fromkeys(SHAPES, (4, 8))
    assert file.outputs == dict.fromkeys(SHAPES, (16, 4))
    assert file.scales == dict.fromkeys(SHAPES, 1.5)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], r".*\.(q|up)_proj", "all-linear"])
def test_targets_may_have_each_form(targets: Any, tmp_path: Path) -> None:
    assert set(open_adapter(make(tmp_path, target_modules=targets)).inputs) == set(SHAPES)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+!", "(a|a)*!", "(a|b){9}!", "(a|aa)" * 30 + "!", "a?" * 9 + "a" * 9, "q" * 200],
)
def test_a_pattern_that_may_never_end_is_refused(pattern: str, tmp_path: Path) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        make(tmp_path)
        change(tmp_path, **{name: {pattern: 8}})
        with pytest.raises(ConfigError, match="may take too long to match; write the modules' nam"):
            open_adapter(tmp_path)


def test_many_slow_patterns_are_refused_within_seconds(tmp_path: Path) -> None:
    layers = {f"{'.' * 90}{index}": (4, 4) for index in range(300)}
    RandomAdapter(tmp_path, layers, seed=1)
    change(tmp_path, alpha_pattern={f".*.*.*x{index}": 8 for index in range(50)})
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="its patterns take too long to match"):
        open_adapter(tmp_path)
    assert time.monotonic() - begun < 60


def test_patterns_give_layers_a_rank_and_a_scale(tmp_path: Path) -> None:
    """As in PEFT, a pattern is a regular expression that matches the end of the name; the first
    that does counts."""
    ranks, alphas = {"1.mlp.up_proj": 2, "up_proj": 6}, {"q_proj": 3.0}
    file = open_adapter(make(tmp_path, rank=4, alpha=8, ranks=ranks, alphas=alphas))
    assert {module: rank for module, (rank, _) in file.inputs.items()} == {
        "model.layers.0.self_attn.q_proj": 4,
        "model.layers.0.mlp.up_proj": 6,
        "model.layers.1.self_attn.q_proj": 4,
        "model.layers.1.mlp.up_proj": 2,
    }
    assert file.scales == {
        "model.layers.0.self_attn.q_proj": 3 / 4,
        "model.layers.0.mlp.up_proj": 8 / 6,
        "model.layers.1.self_attn.q_proj": 3 / 4,
        "model.layers.1.mlp.up_proj": 8 / 2,
    }
    change(tmp_path, rank_pattern={r"layers\.1\..*_proj": 9, "up_proj": 6})
    with pytest.raises(CheckpointError, match="rank 9, but its A has rank"):
        open_adapter(tmp_path)


def test_rank_stabilised_scales(tmp_path: Path) -> None:
    file = open_adapter(make(tmp_path, rank=9, alpha=6, use_rslora=True))
    assert set(file.scales.values()) == {2.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [5]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("corda_config", {"a": 1}),
        ("a_field_of_the_future", "yes"),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("peft_type", "IA3"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("lora_alpha", 0),
        ("lora_alpha", None),
        ("lora_alpha", "8"),
        ("lora_alpha", 10**400),
        ("rank_pattern", {".*": 10**400}),
        ("r", 5),
        ("alpha_pattern", {"(": 8}),
        ("alpha_pattern", ["q_proj"]),
    ],
)
def test_what_is_more_than_plain_lora_is_refused_by_name(
    field: str, value: Any, tmp_path: Path
) -> None:
    change(make(tmp_path), **{field: value})
    with pytest.raises(ConfigError, match=field if field != "r" else "rank 5"):
        open_adapter(tmp_path)


def test_large_ranks_are_refused(tmp_path: Path) -> None:
    assert open_adapter(make(tmp_path / "128", rank=128)).rank == 128
    with pytest.raises(ConfigError, match="rank 129, and at most 128"):
        open_adapter(make(tmp_path / "129", rank=129))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    file = make(tmp_path) / "adapter_model.safetensors"
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin, which is a pickle"):
        open_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "only linear layers"),
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", "magnitude"),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight", "lacks A or B"),
    ],
)
def test_other_tensors_are_refused_by_name(name: str, says: str, tmp_path: Path) -> None:
    file = make(tmp_path) / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(4, 8)}, file)
    with pytest.raises(CheckpointError, match=says):
        open_adapter(tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = make(tmp_path) / "adapter_model.safetensors"
    whole = file.read_bytes()
    cut = (whole[:-1], whole[:-200])
    other = (b"", b"{}", whole[:40], b"\xff" * 100, b"\x02" + bytes(7) + b"[]", bytes(8))
    for data in (*cut, *other):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged"):
            open_adapter(tmp_path)
    save_file({name: tensor.to(torch.int8) for name, tensor in load_whole(whole).items()}, file)
    with pytest.raises(CheckpointError, match="type I8"):
        open_adapter(tmp_path)
    save_file({}, file)
    with pytest.raises(CheckpointError, match="has no tensors"):
        open_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="has no adapter_config"):
        open_adapter(tmp_path / "none")


def test_a_digest_is_of_both_files(tmp_path: Path) -> None:
    folder = make(tmp_path)
    first = read_adapter(folder)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    assert first.digest == digest_of(folder) == digest_of(folder, weights)
    change(folder, lora_alpha=9)
    second = digest_of(folder)
    make(folder, rank=5)
    assert len({first.digest, second, digest_of(folder)}) == 3
