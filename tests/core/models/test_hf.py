"""Finding a checkpoint; nothing here reaches the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from minisgl.errors import CheckpointError, ConfigError
from minisgl.utils import hub
from minisgl.utils.hf import fetched_adapters, mending, resolve_checkpoint, weight_files


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub of these tests is always there. `utils/test_hub.py` tests a missing one."""
    monkeypatch.setattr(hub, "why_offline", lambda: "")


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_a_folder_imports_no_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from minisgl.utils.hf import resolve_checkpoint as r; r(sys.argv[1]);"
        "sys.exit(any(m in sys.modules for m in ('huggingface_hub', 'torch', 'transformers')))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert result.returncode == 0


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve_checkpoint(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match="an empty string"):
        resolve_checkpoint("")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_checkpoint(str(tmp_path / "model.bin"))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigError, match=r"pipe\.gguf is no regular file; name a folder"):
        resolve_checkpoint(str(tmp_path / "pipe.gguf"))
    with pytest.raises(ConfigError, match=r"--lora sql: .*model\.bin is a file; an adapter is"):
        fetched_adapters({"sql": str(tmp_path / "model.bin")}, "huggingface")
    for model in ("/no/such/folder", "./here", "a/b/c", "a b"):
        with pytest.raises(ConfigError, match=f"there is no folder {model}"):
            resolve_checkpoint(model)
    name = "/" + "a" * 300  # a folder that may not be entered is none for root
    with pytest.raises(ConfigError, match=f"{name} cannot be read: File name too long|no folder"):
        resolve_checkpoint(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adapter_config.json", r"an adapter \(LoRA\) of org/base: serve that model with --lora"),
        ("model-Q4_K_M.gguf", "to serve a GGUF file, name the file itself"),
        ("pytorch_model.bin", "its weights are PyTorch pickles: take a copy .* with safetensors"),
    ],
)
def test_another_format_says_what_to_do(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / name).write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(CheckpointError, match=rf"has no config\.json; .*{says}"):
        resolve_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"has neither model\.safetensors .*{says}"):
        weight_files(tmp_path)


def test_socks_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **options: Any) -> str:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match=r"a SOCKS proxy run pip install 'httpx\[socks\]'"):
        resolve_checkpoint("org/name")


@pytest.mark.needs("minisgl_zoo")
def test_a_file_is_called_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file that does not exist was "no folder", or asked of the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"is a file, and no .*; its folder .* has one"):
        resolve_checkpoint("model.safetensors")
    (tmp_path / "a/b").mkdir(parents=True)
    for model in ("x.gguf", str(tmp_path / "x.gguf"), "./a/b/x.gguf", "a/b/x.gguf"):
        with pytest.raises(ConfigError, match=rf"there is no file {model}; .* has no GGUF file"):
            resolve_checkpoint(model)
    (tmp_path / "y.gguf").touch()
    with pytest.raises(ConfigError, match=r"there is no file x\.gguf; \. has y\.gguf"):
        resolve_checkpoint("x.gguf")
    for name in ("blob", "M.GGUF"):
        (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(CheckpointError, match=f"{name} is damaged or incomplete"):
            resolve_checkpoint(name)


def test_a_file_that_cannot_be_read_is_not_called_broken(tmp_path: Path) -> None:
    assert mending(tmp_path / "a link to nowhere") == "download it again"
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        mending(tmp_path)


def _http(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
    request = httpx.Request("GET", "https://example.invalid")
    return kind("server says no", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            _http(errors.GatedRepoError, 403),
            "accept its licence at https://huggingface.co/org/name, log in",
        ),
        (
            _http(errors.RepositoryNotFoundError, 404),
            "org/name cannot be downloaded: Hugging Face has no such model",
        ),
        (
            _http(errors.HfHubHTTPError, 401),
            "HfHubHTTPError: server says no; log in with `hf auth login` or set HF_TOKEN",
        ),
        (json.JSONDecodeError("page", "<html>", 0), "sends no JSON; a login page, a wrong mirror?"),
        (
            _http(errors.HfHubHTTPError, 503),
            "org/name cannot be downloaded: HfHubHTTPError: server says no",
        ),
        (errors.LocalEntryNotFoundError("no cache"), "is not reachable"),
        (httpx.ReadTimeout("slow"), "ReadTimeout: slow"),
        (OSError("No space left on device"), "No space left on device"),
    ],
)
def test_each_failure_of_a_download_has_a_sentence(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=message):
        resolve_checkpoint("org/name")


@pytest.mark.parametrize("weights", [True, False])
def test_download_takes_only_what_is_used(
    weights: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("org/name", weights=weights) == tmp_path
    assert asked["model"] == "org/name"
    assert ("*.safetensors" in asked["allow_patterns"]) == weights
    assert {"*.json", "*.jinja"} <= set(asked["allow_patterns"])


@pytest.mark.needs("minisgl_zoo")
def test_modelscope_is_named_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match=r"pip install 'minisgl\[modelscope\]'"):
        resolve_checkpoint("org/name", source="modelscope")


def _hub(monkeypatch: pytest.MonkeyPatch, folder: Path, repo: str, *files: str) -> list[str]:
    """A hub with one repository, whose files are those of `folder`. Returns what is downloaded."""
    taken: list[str] = []

    def download(asked: str, name: str, **_: Any) -> str:
        assert asked == repo
        taken.append(name)
        return str(folder / name)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, asked: [*files])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("minisgl_zoo.gguf.hub.gguf_folder", lambda path: folder / f"{path.name}.d")
    for name in files:
        (folder / f"{Path(name).name}.d").mkdir()
        (folder / f"{Path(name).name}.d" / "config.json").touch()
    return taken


FILES = (
    *("README.md", "mmproj-F16.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-Q8_0.gguf"),
    *("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"),
)


@pytest.mark.needs("minisgl_zoo")
@pytest.mark.parametrize(
    ("model", "takes"),
    [
        ("org/m-GGUF:Q8_0", FILES[4:5]),
        ("hf.co/org/m-GGUF:q4_k_m", FILES[2:3]),
        ("https://huggingface.co/org/m-GGUF:UD-Q4_K_M", FILES[3:4]),
        ("org/m-GGUF:BF16", FILES[5:]),
        ("org/m-GGUF/BF16/m-BF16-00002-of-00002.gguf", FILES[5:]),
        ("org/m-GGUF", FILES[2:3]),
    ],
)
def test_a_gguf_file_of_the_hub(
    model: str, takes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = _hub(monkeypatch, tmp_path, "org/m-GGUF", *FILES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve_checkpoint(model) == tmp_path / f"{Path(takes[0]).name}.d"
    assert tuple(taken) == takes


@pytest.mark.needs("minisgl_zoo")
def test_a_gguf_file_that_the_hub_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _hub(monkeypatch, tmp_path, "org/m", *FILES[:5])
    for model, asked in (
        ("org/m:Q2_K", "Q2_K"),
        ("org/m/x.gguf", r"x\.gguf"),
        ("org/m:K_M", "K_M"),
    ):
        with pytest.raises(
            ConfigError, match=rf"org/m has no GGUF files {asked}; name one"
        ) as error:
            resolve_checkpoint(model)
        assert "m-Q8_0.gguf" in str(error.value)
        assert "mmproj" not in str(error.value)


@pytest.mark.needs("minisgl_zoo")
def test_a_repository_without_weights_that_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _hub(monkeypatch, tmp_path, "org/m", "pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve_checkpoint("org/m")
