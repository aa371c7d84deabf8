"""GGUF files that llama.cpp's own converter wrote, against llama.cpp's logits and transformers'.

`scripts/gguf_golden.py` made the files; `gguf_golden_cases.py` beside it has the configs.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from helpers.gguf_files import CONFIGS, write
from helpers.model_harness import Runner, Sequence, load, relative_error
from minisgl import env
from minisgl.distributed import SingleRank
from minisgl.errors import CheckpointError, ConfigError
from minisgl.kernel.ops import Ops
from minisgl.models import build_model
from minisgl.models.loading.reading import read_config
from minisgl_zoo.gguf.checkpoint import GgufCheckpoint
from minisgl_zoo.gguf.config import _ends, config_of
from minisgl_zoo.gguf.families import FAMILIES
from minisgl_zoo.gguf.folder import gguf_folder
from minisgl_zoo.gguf.names import ENCODERS
from minisgl_zoo.gguf.values import CONTROL, GgufValues

GOLDEN = Path(__file__).parent / "gguf_golden.zip"
POSITIONS = [19, 39]
NAMES = [name[:-5] for name in zipfile.ZipFile(GOLDEN).namelist() if name.endswith(".gguf")]
HALF = 5e-3
"""Of Gemma: llama.cpp reads its activation from a table in float16."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path / "cache")


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(GOLDEN) as golden:
        path = Path(golden.extract(f"{name}.gguf", tmp_path))
        values = np.frombuffer(golden.read(f"{name}.logits"), np.float32)
        ids = json.loads(golden.read("ids"))
    count = 1 if name.startswith(("deepseek2", "dots1", "afmoe")) else 2  # without llama.cpp's
    *llama_cpp, transformers = torch.from_numpy(values.copy()).view(count, len(POSITIONS), -1)
    sequence = Sequence(ids, 1)
    with torch.inference_mode():
        Runner(load(gguf_folder(path)), page_size=4).generate([sequence], chunk=32)
    logits = torch.cat(sequence.logits)[POSITIONS]
    assert relative_error(logits, transformers) <= 1e-4
    for each in llama_cpp:
        assert relative_error(logits, each) <= (HALF if name.startswith("gemma") else 1e-4)


def test_multi_token_prediction_is_not_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(GOLDEN) as golden:
        path = Path(golden.extract("qwen3next.gguf", tmp_path))
    with pytest.raises(ConfigError, match="--drafts mtp needs a layer of multi-token prediction"):
        build_model(
            read_config(gguf_folder(path), mtp=True),
            dtype=torch.float32,
            ops=Ops(),
            comm=SingleRank(),
        )


def test_each_architecture_is_compared() -> None:
    """Here, or in `test_gguf` with files of this repository's writer. GLM's is called chatglm."""
    encoders = {*ENCODERS, "gemma-embedding"}  # in `tests/zoo/pooling`
    assert FAMILIES.keys() <= {*NAMES, *CONFIGS, *encoders, "chatglm"}


def test_a_model_in_parts(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", "qwen3")
    write(tmp_path / "m.gguf", "qwen3", tensors_of_a_part=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    folder = gguf_folder(parts[1])
    config = (folder / "config.json").read_text()
    assert config == (gguf_folder(tmp_path / "whole.gguf") / "config.json").read_text()
    whole, made = (
        GgufCheckpoint(each, read_config(each))
        for each in (gguf_folder(tmp_path / "whole.gguf"), folder)
    )
    assert made.names == whole.names
    parts[2].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts, and .* lacks m-00003-of-00003"):
        gguf_folder(parts[0])
    parts[0].rename(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="one of 3 parts by its metadata, but one of 1 by its"):
        gguf_folder(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("arch", "layers", "divisor"),
    [("gemma2", 46, 144), ("gemma2", 26, 128), ("gemma3", 62, 144), ("gemma3", 26, 128)],
)
def test_the_largest_gemma_scales_queries_by_its_width(
    arch: str, layers: int, divisor: int
) -> None:
    values = {
        "block_count": layers,
        "embedding_length": 4608,
        "attention.head_count": 32,
        "attention.key_length": 128,
        "attention.sliding_window": 4096,
    }
    file = GgufValues(
        {"general.architecture": arch, **{f"{arch}.{key}": x for key, x in values.items()}},
        {},
        Path("m.gguf"),
    )
    assert FAMILIES[arch][1](file)["query_pre_attn_scalar"] == divisor


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], [1, 2]),  # harmony: it ends a message
        (["<|end|>", "<|return|>", "a"], [0, 1]),
        (["a", "<|im_end|>", "</s>"], [1, 2]),
    ],
)
def test_tokens_that_end_an_answer(tokens: list[str], ends: list[int]) -> None:
    values = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * len(tokens),
    }
    assert _ends(values) == ends


def test_a_vision_glm_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(GOLDEN) as golden:
        path = Path(golden.extract("glm4.gguf", tmp_path))
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    values["glm4.rope.dimension_sections"] = [2, 1, 1, 0]
    with pytest.raises(ConfigError, match="this GLM reads images, too"):
        config_of(values, {tensor.name: tensor for tensor in reader.tensors}, path)
