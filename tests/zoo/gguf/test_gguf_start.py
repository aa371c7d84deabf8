"""What a start reads of a GGUF file: its header once, its tokenizer once, nothing twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from helpers.gguf_files import write
from helpers.model_harness import load
from minisgl.errors import CheckpointError
from minisgl_zoo.gguf import folder as folders
from minisgl_zoo.gguf.folder import gguf_folder
from minisgl_zoo.gguf.header import read_header
from minisgl_zoo.gguf.index import open_weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose headers are read from now on, in order."""
    read: list[Path] = []

    def counted(path: Path) -> Any:
        read.append(path)
        return read_header(path)

    monkeypatch.setattr("minisgl_zoo.gguf.folder.read_header", counted)
    return read


@pytest.mark.parametrize(
    ("kind", "alignment"), [(Kind.F32, 32), (Kind.Q4_K, 32), (Kind.IQ4_XS, 4096), (Kind.BF16, 32)]
)
def test_the_header_is_as_the_package_gguf_reads_it(
    kind: Kind, alignment: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    aligned = partial(gguf.GGUFWriter.add_custom_alignment, alignment=alignment)
    write(path, "gemma3", kind, change=aligned if alignment != 32 else None)
    reader = gguf.GGUFReader(path)
    values, _ = read_header(path)
    theirs = {name: field.contents() for name, field in reader.fields.items()}
    assert values == {key: theirs[key] for key in theirs if not key.startswith("GGUF.")}
    _, tensors = open_weights(gguf_folder(path))
    assert len(tensors) == len(reader.tensors)
    for ours, their in zip(tensors, reader.tensors, strict=True):
        assert (ours.name, ours.kind) == (their.name, their.tensor_type.name)
        assert ours.shape == tuple(their.shape)
        assert np.array_equal(ours.data, their.data)
        assert not ours.data.flags.writeable


def test_a_header_is_read_once_and_then_never_again(tmp_path: Path, headers: list[Path]) -> None:
    """Each rank used to read all of it again: 26 s of 36 for a vocabulary of 262,144 tokens."""
    path = tmp_path / "m.gguf"
    write(path, "llama", Kind.Q4_0)
    folder = gguf_folder(path)
    assert len(headers) == 1
    assert gguf_folder(path) == folder
    load(folder)
    assert len(headers) == 1


def test_plain_numbers_and_packed_ones_need_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import takes 0.3 s."""
    write(tmp_path / "m.gguf", "llama", Kind.F16)
    folder = gguf_folder(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    load(folder)


def test_the_shapes_of_norms_need_no_symbolic_algebra(tmp_path: Path) -> None:
    """torch imports sympy for arithmetic on `meta`: 1.1 of 3 s of Gemma's start."""
    write(tmp_path / "m.gguf", "gemma3")
    code = (
        "import sys; from pathlib import Path;"
        "from minisgl.models.loading.reading import read_config;"
        "from minisgl_zoo.gguf.checkpoint import GgufCheckpoint; folder = Path(sys.argv[1]);"
        "made = GgufCheckpoint(folder, read_config(folder));"
        "[made.shape(name) for name in made.names];"
        "sys.exit('sympy' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(gguf_folder(tmp_path / "m.gguf"))]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "tensors.json").write_bytes(b"\0" * 100),
        lambda folder: (folder / "model.gguf").unlink(),
    ],
)
def test_a_damaged_folder_is_made_anew(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, "llama")
    folder = gguf_folder(path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    damage(folder)
    assert gguf_folder(path) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert list((tmp_path / "cache/gguf").iterdir()) == [folder]


def test_a_file_that_changes_behind_its_folder_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, "llama")
    folder = gguf_folder(path)
    os.utime(path, (1, 1))
    with pytest.raises(CheckpointError, match="has changed; start again"):
        load(folder)
    assert gguf_folder(path) != folder


def test_a_cut_off_file_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine noticed it after 22 s, when it loaded the weights."""
    path = tmp_path / "m.gguf"
    write(path, "llama", Kind.Q8_0)
    os.truncate(path, path.stat().st_size - 1000)
    monkeypatch.setattr(folders, "_make", None)
    with pytest.raises(CheckpointError, match=r"its tensor .* would end at .*download it again"):
        gguf_folder(path)


def test_the_first_start_says_what_takes_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "m.gguf", "llama")
    with caplog.at_level("INFO", logger="minisgl"):
        folder = gguf_folder(tmp_path / "m.gguf")
    tokens = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert f"converting the tokenizer of m.gguf: {tokens:,} tokens" in caplog.text
