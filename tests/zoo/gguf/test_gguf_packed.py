"""GGUF files of each architecture whose matrices stay packed: the values are the file's."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from helpers.model_harness import load
from minisgl import env
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import load_library
from minisgl.quantization.parameter import TensorOwner
from minisgl.quantization.weight import Weight
from minisgl_zoo.gguf.folder import gguf_folder
from minisgl_zoo.gguf.tensors import Dequantised, Stack
from minisgl_zoo.gguf.weight import BlockWeight

GOLDEN = Path(__file__).parent / "gguf_golden.zip"
NAMES = [name[:-5] for name in zipfile.ZipFile(GOLDEN).namelist() if name.endswith(".gguf")]
PLAIN = ("norm", "conv", "ffn_gate_inp", "rope")
"""In the names of tensors that llama.cpp does not quantise."""


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(load_library())


def weights(node: TensorOwner) -> Iterator[Weight]:
    if isinstance(node, Weight):
        yield node
        return
    for child in node.children():
        yield from weights(child)


def quantise(source: Path, target: Path) -> None:
    """Write the file with its matrices in Q8_0."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(
                name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None
            )
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_plain = any(part in tensor.name for part in PLAIN)
        if is_plain or values.ndim < 2 or values.shape[-1] % 32:
            writer.add_tensor(tensor.name, values)
        else:
            blocks = gguf.quants.quantize(values, Kind.Q8_0)
            writer.add_tensor(tensor.name, blocks, raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_rows_of_several_experts_are_joined() -> None:
    """Rows 1 to 5 of two experts, of tensors with 3 rows and 4 rows."""
    whole = np.arange(3 * 7 * 2, dtype=np.float32).reshape(3, 7, 2)
    stack = Stack([Dequantised(whole[:, a:b], "F32") for a, b in ((0, 3), (3, 7))])
    assert stack.get_shape() == [3, 7, 2]
    for experts in (slice(1, 3), 1):
        rows = stack[(experts, slice(1, 6), slice(None))]
        assert rows.tolist() == whole[experts, 1:6].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_weights(name: str, tmp_path: Path, ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path / "cache")
    with zipfile.ZipFile(GOLDEN) as golden:
        quantise(Path(golden.extract(f"{name}.gguf", tmp_path)), tmp_path / "m.gguf")
    folder = gguf_folder(tmp_path / "m.gguf")
    packed = list(weights(load(folder, torch.bfloat16, ops=ops)))
    exact = list(weights(load(folder)))
    assert any(isinstance(weight, BlockWeight) for weight in packed)
    for ours, theirs in zip(packed, exact, strict=True):
        assert torch.equal(ours.dense(), theirs.dense().bfloat16())
