"""A damaged GGUF file is refused at once, whatever its counts say."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from minisgl.errors import CheckpointError
from minisgl_zoo.gguf.folder import gguf_folder

HUGE = 2**62


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*, version: int = 3, tensors: int = 0, values: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
DAMAGED = {
    "no values": (header(values=HUGE), "within its header"),
    "no tensors": (header(tensors=HUGE) + ARCHITECTURE, "within its header"),
    "array": (header() + text("a") + struct.pack("<IIQ", 9, 4, HUGE), "within its header"),
    "texts": (header() + text("a") + struct.pack("<IIQ", 9, 8, HUGE), "within its header"),
    "text": (header() + struct.pack("<Q", HUGE), "within its header"),
    "nested": (header() + text("a") + struct.pack("<IIQ", 9, 9, 1), "type 9"),
    "type": (header() + text("a") + struct.pack("<I", 77), "type 77"),
    "dimensions": (
        header(tensors=1, values=0) + text("a") + struct.pack("<I", 2**31),
        "2147483648 dimensions",
    ),
    "big-endian": (header(version=3 << 24), "little-endian"),
    "twice": (header(values=2) + ARCHITECTURE * 2 + bytes(64), "damaged"),
    "empty": (b"", "empty"),
    "other": (b"PK\x03\x04", "does not begin with GGUF"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "`git lfs pull` there",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path))
    data, says = DAMAGED[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=says):
        gguf_folder(path)
