"""`minisgl pull`, `list` and `rm` over a cache of huggingface_hub, and hints for other names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.shells import minisgl
from minisgl.cli import run_command
from minisgl_gateway.other_engines import COMMANDS

COMMIT = "0123456789012345678901234567890123456789"


def cached(home: Path, repo: str, *files: str) -> Path:
    """Put files of 1 MiB into the cache, as the library does. Returns the repository's folder."""
    folder = home / f"hub/models--{repo.replace('/', '--')}"
    for kind in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (folder / kind).mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    for name in files:
        (folder / "blobs" / name).write_bytes(bytes(1 << 20))
        (folder / f"snapshots/{COMMIT}" / name).symlink_to(f"../../blobs/{name}")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library's home, with two models and a data set."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "minisgl"))
    return tmp_path / "hf"


def test_list_shows_names_sizes_and_weights(home: Path) -> None:
    done = minisgl("list")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "no model is downloaded; minisgl pull ORG/REPO downloads one\n"
    cached(home, "org/tiny-GGUF", "tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf")
    cached(home, "Org/plain", "model.safetensors")
    (home / "hub/datasets--org--data/snapshots").mkdir(parents=True)
    done = minisgl("list")
    assert done.returncode == 0
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["NAME", "SIZE", "CHANGED", "WEIGHTS"]
    assert [row.split()[:3] for row in rows] == [
        ["Org/plain", "1.0", "MiB"],
        ["org/tiny-GGUF", "2.0", "MiB"],
    ]
    assert rows[0].endswith("safetensors")
    assert rows[1].endswith("tiny-Q4_K_M.gguf, tiny-Q8_0.gguf")


def test_rm_needs_the_exact_name(home: Path, tmp_path: Path) -> None:
    folder = cached(home, "org/tiny-GGUF", "tiny-Q8_0.gguf")
    other = cached(home, "org/other", "model.safetensors")  # with the same commit's hash
    made = tmp_path / "minisgl/gguf/tiny-0123"
    made.mkdir(parents=True)
    (made / "model.gguf").symlink_to((folder / "blobs/tiny-Q8_0.gguf").resolve())
    kept = tmp_path / "minisgl/gguf/own-0123"
    kept.mkdir()
    (kept / "model.gguf").symlink_to(os.devnull)
    for name, hint in (
        ("org/tiny-gguf", "did you mean org/tiny-GGUF?"),
        ("org/tiny-GGUF:Q8_0", "all its files are removed together: minisgl rm org/tiny-GGUF"),
        ("nothing", "minisgl list shows the names"),
    ):
        done = minisgl("rm", name)
        assert done.returncode == 1
        assert f"{name} is not the name of a downloaded model; {hint}" in done.stderr
    assert folder.exists()
    done = minisgl("rm", "org/tiny-GGUF")
    assert (done.returncode, done.stdout) == (0, "removed org/tiny-GGUF: 1.0 MiB\n"), done.stderr
    assert [folder.exists(), other.exists(), made.exists(), kept.exists()] == [
        False,
        True,
        False,
        True,
    ]


def test_pull_says_what_is_wrong(home: Path, tmp_path: Path) -> None:
    done = minisgl("pull", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path} is a file or folder of this machine" in done.stderr
    done = minisgl("pull", "org/repo:Q4_K_M")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("minisgl pull: org/repo cannot be downloaded: ")
    assert minisgl("pull").returncode == 2


def test_pull_of_what_is_there(home: Path) -> None:
    """Without a network: the cache has it."""
    folder = cached(home, "org/plain", "model.safetensors", "config.json")
    done = minisgl("pull", "org/plain")
    snapshot = folder / "snapshots" / COMMIT
    assert done.stdout == f"org/plain is in {snapshot}; minisgl serve org/plain serves it\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_ollamas_other_commands_have_hints(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([command], 0.0) == 2
    assert COMMANDS[command] in capsys.readouterr().err
