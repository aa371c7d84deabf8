"""What the next formats need of the seam, with a toy: packed int4 with a scale for each block.

Its checkpoint tensors have other names, shapes and dtypes than the matrix; ranks must cut whole
blocks; merged and stacked matrices keep their own scales.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2MoeConfig

from helpers.family_cases import MOE, SIZES
from helpers.local_ranks import ranks
from helpers.model_harness import CPU, Runner, Sequence, make_reference, random_ids, relative_error
from minisgl.distributed import DistributedCommunicator, SingleRank
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops
from minisgl.layers.shard import split_columns
from minisgl.models import build_model, load_weight
from minisgl.models.loading.reading import read_config
from minisgl.models.loading.weight import Checkpoint
from minisgl.quantization import PLAIN, Format, Formats, Part, Weight
from minisgl.quantization.weight import Target, WeightBuild

BLOCK = 4


class ToyWeight(Weight):
    """NAME.packed [O, I / 2] (two numbers of 0 to 15 a byte, the first in the low bits) and
    NAME.scale [O / 4, I / 4]. value = (number - 8) * scale."""

    packed: Tensor
    scale: Tensor

    def __init__(self, build: WeightBuild) -> None:
        super().__init__(build)
        packed = [self._cut(part, "packed", (1, 2)) for part in build.parts]
        scale = [self._cut(part, "scale", (BLOCK, BLOCK)) for part in build.parts]
        self.declare("packed", torch.uint8, *packed, rows=build.rows, stacked=build.stacked)
        self.declare("scale", torch.float32, *scale, stacked=build.stacked)

    @staticmethod
    def _cut(part: Part, name: str, unit: tuple[int, int]) -> Part:
        """The tensor that has a number for each `unit` rows and columns of the matrix."""
        start, stop, per = part.share.start, part.share.stop, unit[part.axis]
        if (start % BLOCK or stop % BLOCK) and stop != part.shape[part.axis]:
            raise ConfigError(f"{part.name}: {part.share} is not on whole blocks of {BLOCK}")
        return replace(
            part,
            name=f"{part.module}.{name}",
            shape=(-(-part.shape[0] // unit[0]), -(-part.shape[1] // unit[1])),
            share=range(start // per, -(-stop // per)),
            stack=None,
        )

    def dense(self) -> Tensor:
        numbers = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(-2).float() - 8
        scales = self.scale.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
        return (numbers * scales[..., : numbers.shape[-2], : numbers.shape[-1]]).to(self.dtype)


class ToyFormats(Formats):
    def of(self, modules: Many[str], target: Target) -> Format:
        is_plain = target == "Embedding" or any("lm_head" in module for module in modules)
        return PLAIN if is_plain else Format(weight=ToyWeight, unit=BLOCK)


def blocks(x: Tensor) -> Tensor:
    return x.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def save(config: PreTrainedConfig, folder: Path) -> None:
    """Save a random model in the toy format to `folder`/toy and dequantised to `folder`/float32."""
    make_reference(config).save_pretrained(folder / "float32", save_original_format=True)
    file = folder / "float32" / "model.safetensors"
    dequantised, toy = load_file(file), {}
    for name, tensor in dequantised.items():
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name:
            toy[name] = tensor
            continue
        height, width = tensor.shape
        assert width % 2 == 0
        padded = torch.zeros(-(-height // BLOCK) * BLOCK, -(-width // BLOCK) * BLOCK)
        padded[:height, :width] = tensor
        scale = torch.nn.functional.max_pool2d(padded.abs()[None], BLOCK)[0] / 7
        spread = blocks(scale)[:height, :width]
        numbers = (tensor / spread).round().clamp(-8, 7)
        dequantised[name] = numbers * spread
        nibbles = (numbers + 8).to(torch.uint8)
        module = name.removesuffix(".weight")
        toy[f"{module}.packed"] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        toy[f"{module}.scale"] = scale
    save_file(dequantised, file)
    (folder / "toy").mkdir()
    save_file(toy, folder / "toy" / "model.safetensors")
    values = json.loads((folder / "float32" / "config.json").read_text())
    (folder / "toy" / "config.json").write_text(json.dumps(values))


def run(
    folder: Path, formats: Formats, comm: DistributedCommunicator, **options: Any
) -> tuple[Tensor, int]:
    """Logits, and the bytes of the weights."""
    config = replace(read_config(folder), formats=formats)
    model = build_model(config, dtype=torch.float32, ops=Ops(), comm=comm, **options)
    load_weight(model, Checkpoint(folder), device=CPU, ops=Ops())
    with torch.inference_mode():
        sequence = Sequence(random_ids(19, 3), 4)
        Runner(model, page_size=4).generate([sequence], chunk=7)
    return torch.cat(sequence.logits), sum(p.num_bytes for p in model.parameters())


# 60 columns: halves of 30 would cut a block, so the ranks get 32 and 28.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**{**SIZES, "intermediate_size": 60}, attention_bias=True),
    "qwen2-moe": Qwen2MoeConfig(
        **{**SIZES, **MOE, "moe_intermediate_size": 20}, shared_expert_intermediate_size=60
    ),
}


@pytest.mark.parametrize(
    ("name", "size", "expert_parallel"),
    [("llama", 1, False), ("llama", 2, False), ("qwen2-moe", 1, False), ("qwen2-moe", 2, False),
     ("qwen2-moe", 2, True)],
)  # fmt: skip
def test_packed_blocks_are_merged_stacked_and_cut(
    name: str, size: int, expert_parallel: bool, tmp_path: Path
) -> None:
    save(CONFIGS[name], tmp_path)
    expected, plain_bytes = run(tmp_path / "float32", Formats(), SingleRank())
    comms = ranks(size) if size > 1 else [SingleRank()]
    with ThreadPoolExecutor(size) as pool:
        together = pool.map(
            lambda comm: run(tmp_path / "toy", ToyFormats(), comm, expert_parallel=expert_parallel),
            comms,
        )
        for logits, num_bytes in together:
            assert relative_error(logits, expected) <= 1e-5
            assert num_bytes < plain_bytes / size


def test_columns_are_cut_between_blocks() -> None:
    assert split_columns(60, 2) == [range(30), range(30, 60)]
    assert split_columns(60, 2, BLOCK) == [range(32), range(32, 60)]
    assert split_columns(1024, 2, 128) == [range(512), range(512, 1024)]
    assert split_columns(640, 2, 128) == [range(384), range(384, 640)]
    assert split_columns(200, 2, 128) == [range(128), range(128, 200)]
    with pytest.raises(ConfigError, match=r"width 200, in blocks of 128, .* by 3 ranks; use at mo"):
        split_columns(200, 3, 128)


def test_heads_that_cut_a_block_are_refused(tmp_path: Path) -> None:
    """Two ranks get 6 of 12 rows of q: 1.5 blocks of 4."""
    config = LlamaConfig(
        **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2}, head_dim=6
    )
    make_reference(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"q_proj.weight: range\(0, 6\) is not on whole blocks"):
        run(tmp_path, ToyFormats(), ranks(2)[0])
