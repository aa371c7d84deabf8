"""Scales of keys and values that a checkpoint brings for `--kv-cache-dtype fp8`.

Planted once, and noticed: keys with the scale of values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from helpers.model_harness import VOCAB, Runner, Sequence, load, make_reference, random_ids
from helpers.quantised_kv import FP8, RoundedCache
from minisgl.distributed import DistributedInfo, SingleRank
from minisgl.engine import Engine, EngineConfig
from minisgl.errors import CheckpointError
from minisgl_zoo.kv8.scales import SPELLINGS, load_kv_scales

K_SCALES, V_SCALES = (0.021, 0.045), (0.013, 0.0065)
"""Of layers 0 and 1."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("plain")
    model = make_reference(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder, model


def write(plain: Path, folder: Path, scales: dict[str, Tensor]) -> Path:
    """The checkpoint with further tensors below each layer's self_attn, by layer."""
    (folder / "config.json").write_text((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    file = folder / "model.safetensors"
    save_file({**tensors, **scales}, file, metadata={"format": "pt"})
    return folder


def named(spelling: str, shape: tuple[int, ...] = ()) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{spelling.format(x=x)}": torch.full(shape, scales[layer])
        for x, scales in (("k", K_SCALES), ("v", V_SCALES))
        for layer in range(2)
    }


def runner_of(folder: Path) -> Runner:
    runner = Runner(load(folder), page_size=4, rows=1, kv_dtype=FP8)
    load_kv_scales(runner.model, folder, runner.contexts, SingleRank())
    return runner


class ScaledCache(RoundedCache):
    """transformers' cache, with other scales in each layer."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, **more: Any) -> Any:
        self.scales = (K_SCALES[layer_idx], V_SCALES[layer_idx])
        return super().update(key_states, value_states, layer_idx, **more)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_logits_are_those_of_scaled_keys_and_values(
    saved: tuple[Path, PreTrainedModel], spelling: str, tmp_path: Path
) -> None:
    plain, theirs = saved
    runner = runner_of(write(plain, tmp_path, named(spelling)))
    sequence = Sequence(random_ids(40), 6)
    runner.generate([sequence], chunk=16)
    ids = torch.tensor([sequence.ids[:-1]])
    with torch.inference_mode():
        want = theirs(ids, cache=ScaledCache(FP8)).logits[0]
        other = theirs(ids, cache=RoundedCache(FP8)).logits[0]
    got = torch.cat(sequence.logits)
    assert (got - want).abs().max() <= 1e-3 * want.abs().max()
    assert (other - want).abs().max() >= 1e-2 * want.abs().max()


def test_an_engine_reads_them(saved: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder = write(saved[0], tmp_path, named(SPELLINGS[0], (1,)))
    for kv_cache_dtype in ("fp8", "int8", "auto"):
        engine = Engine(
            EngineConfig(
                model=str(folder), num_pages=8, device="cpu", kv_cache_dtype=kv_cache_dtype
            )
        )
        layers = [engine._contexts[0].kv_pool.layer(index) for index in range(2)]
        if kv_cache_dtype == "fp8":
            assert [layer.k_scale.tolist() for layer in layers] == [
                pytest.approx([scale] * 2) for scale in K_SCALES
            ]
            assert [layer.v_scale.tolist() for layer in layers] == [
                pytest.approx([scale] * 2) for scale in V_SCALES
            ]
        engine.close()


def test_a_rank_takes_those_of_its_heads(
    saved: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    scales = named(SPELLINGS[0], (2, 1, 1))
    for name, scale in scales.items():
        scale[1] *= 3
        assert name.endswith("_scale")
    folder = write(saved[0], tmp_path, scales)
    layer = runner_of(folder).contexts[0].kv_pool.layer(1)
    assert layer.k_scale.tolist() == pytest.approx([K_SCALES[1], 3 * K_SCALES[1]])

    rank_1 = SingleRank()
    rank_1.info, rank_1.rank, rank_1.size = DistributedInfo(1, 2), 1, 2
    model = load(folder, comm=rank_1)
    runner = Runner(model, page_size=4, rows=1, kv_dtype=FP8)
    load_kv_scales(model, folder, runner.contexts, rank_1)
    layer = runner.contexts[0].kv_pool.layer(1)
    assert layer.k_scale.tolist() == pytest.approx([3 * K_SCALES[1]])
    assert layer.v_scale.tolist() == pytest.approx([3 * V_SCALES[1]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": None}, "has model.layers.1.self_attn.v_scale, but of keys and values"),
        (
            {"v_scale": torch.tensor([1.0, 2.0, 3.0])},
            r"has shape \[3\]; expected one scale, or",
        ),
        ({"k_scale": torch.tensor(0.0)}, "has a scale of 0; expected positive numbers"),
        ({"k_scale": torch.tensor(-2.0)}, "has a scale of -2; expected positive numbers"),
        ({"v_scale": torch.tensor(torch.inf)}, "has a scale of inf; expected positive numbers"),
    ],
)
def test_refusals(
    saved: tuple[Path, PreTrainedModel],
    changes: dict[str, Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    scales = named(SPELLINGS[0])
    for name, scale in changes.items():
        scales.pop(f"model.layers.1.self_attn.{name}")
        if scale is not None:
            scales[f"model.layers.1.self_attn.{name}"] = scale
    with pytest.raises(CheckpointError, match=message):
        runner_of(write(saved[0], tmp_path, scales))
