"""What the APIs say of a GGUF file: its sizes and type, and the sampling that it recommends."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import httpx
import ollama
import pytest
from gguf import GGMLQuantizationType as Kind

from helpers.gguf_files import CONFIGS, write
from helpers.model_harness import make_reference
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl import env
from minisgl.core import SamplingParams
from minisgl.tokenizer.defaults import sampling_defaults
from minisgl_gateway.card import read_card
from minisgl_zoo.gguf.folder import gguf_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path / "cache")


def typed(writer: gguf.GGUFWriter) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)


def test_ollamas_client_sees_a_gguf_file(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", Kind.Q8_0, change=typed)
    num = sum(tensor.numel() for tensor in make_reference(CONFIGS["llama"]).state_dict().values())
    with (
        ScriptedServer(folder=gguf_folder(tmp_path / "m.gguf")) as server,
        ollama.Client(host=server.url) as client,
    ):
        for entry in (client.list().models[0], client.ps().models[0]):
            assert entry.size == (tmp_path / "m.gguf").stat().st_size
            assert entry.details
            assert (entry.details.format, entry.details.family) == ("gguf", "llama")
            assert entry.details.families == ["llama"]
            assert entry.details.quantization_level == "Q4_K_M"
            assert entry.details.parameter_size == f"{num / 10**6:.1f}M"
        shown = client.show(MODEL)
        assert shown.details
        assert (shown.details.format, shown.details.family) == ("gguf", "llama")
        info = shown.modelinfo
        assert info
        assert (info["general.architecture"], info["general.parameter_count"]) == ("llama", num)
        assert info["llama.embedding_length"] == 256
        assert info["llama.block_count"] == 2
        assert "llama.context_length" in httpx.post(f"{server.url}/api/show", json={}).text


def test_parts_count_together(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", tensors_of_a_part=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    card = read_card(gguf_folder(parts[0]))
    assert len(parts) > 1
    assert card.num_bytes == sum(part.stat().st_size for part in parts)
    assert card.quantization == "F32"  # no key says it: the type of most parameters


def named(writer: gguf.GGUFWriter) -> None:
    writer.add_string("general.basename", "smollm2")


def recommending(writer: gguf.GGUFWriter) -> None:
    named(writer)
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_float32("general.sampling.penalty_repeat", 1.1)


def test_a_file_recommends_sampling_itself_or_by_its_name(tmp_path: Path) -> None:
    write(tmp_path / "named.gguf", "llama", change=named)
    folder = gguf_folder(tmp_path / "named.gguf")
    assert sampling_defaults(folder) == SamplingParams(temperature=0.2, top_p=0.9)
    write(tmp_path / "own.gguf", "llama", change=recommending)
    folder = gguf_folder(tmp_path / "own.gguf")
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {"temperature": 0.6, "top_k": 40, "repetition_penalty": 1.1}
    assert sampling_defaults(folder) == SamplingParams(
        temperature=0.6, top_k=40, repetition_penalty=1.1
    )


def test_models_say_their_defaults_and_whether_they_chat(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama")
    with ScriptedServer(folder=gguf_folder(tmp_path / "m.gguf")) as server:
        [entry, _] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert entry["sampling_defaults"] == {
        "temperature": 0.25, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert entry["has_chat_template"] is True
    assert entry["has_thinking_switch"] is False
