"""Finding a checkpoint; nothing here reaches the network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from minisgl.errors import CheckpointError, ConfigError
from minisgl.models.weight import weight_files
from minisgl.utils.hf import mending, resolve_checkpoint


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
    for model in ("/no/such/folder", "./here", "a/b/c", "a b"):
        with pytest.raises(ConfigError, match=f"there is no folder {model}"):
            resolve_checkpoint(model)
    name = "/" + "a" * 300  # a folder that may not be entered is none for root
    with pytest.raises(ConfigError, match=f"{name} cannot be read: File name too long|no folder"):
        resolve_checkpoint(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adapter_config.json", r"an adapter \(LoRA\) of org/base: merge it into that model"),
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
            _http(errors.HfHubHTTPError, 503),
            "org/name cannot be downloaded: HfHubHTTPError: server says no",
        ),
        (errors.LocalEntryNotFoundError("no cache"), "is not reachable"),
        (httpx.ReadTimeout("slow"), "ReadTimeout: slow"),
        (OSError("No space left on device"), "No space left on device"),
    ],
)
def test_what_goes_wrong_with_a_download_is_said(
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
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("org/name", weights=weights) == tmp_path
    assert asked["model"] == "org/name"
    assert ("*.safetensors" in asked["allow_patterns"]) == weights
    assert {"*.json", "*.jinja"} <= set(asked["allow_patterns"])


def test_modelscope_is_named_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match=r"pip install 'minisgl\[modelscope\]'"):
        resolve_checkpoint("org/name", source="modelscope")
