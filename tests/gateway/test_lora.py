"""Adapters of a server: chosen by `model` at every door, loaded and unloaded at run time."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from helpers.adapters import RandomAdapter
from helpers.routing import Setup
from helpers.running_server import RunningServer, assert_nothing_left
from helpers.scripted_server import STATE, ScriptedServer
from minisgl.core import SamplingParams
from minisgl.core.adapters import Adapter
from minisgl.errors import CheckpointError, ConfigError, InvalidRequest
from minisgl.llm import LLM
from minisgl.server.flags import parse_args
from minisgl.server.model import find_model
from minisgl_gateway import lora
from minisgl_gateway.lora import LoadRequest

pytestmark = pytest.mark.needs("minisgl_zoo")

BASE = "minisgl-builtin"
SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(6)
    for name, shape in (
        ("self_attn.q_proj", (256, 256)),
        ("self_attn.v_proj", (128, 256)),
        ("self_attn.o_proj", (256, 256)),
        ("mlp.up_proj", (768, 256)),
        ("mlp.down_proj", (256, 768)),
    )
}
"""Of the built-in model."""
TEXT = "Three cats sit on a wall. One of them"
KEYS = """
[admin]
key = "admin-key"
admin = true
[user]
key = "user-key"
share_cache = true
[other]
key = "other-key"
share_cache = true
"""


class Served:
    """A server with the adapter `first`, and the folder for others."""

    def __init__(self, server: RunningServer, folder: Path) -> None:
        self.server, self.folder, self.url = server, folder, server.url

    def post(self, path: str, fields: dict[str, Any], key: str = "user-key") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}{path}", json=fields, headers=headers, timeout=150)

    def load(self, name: str, path: str | Path, **more: Any) -> httpx.Response:
        fields = {"lora_name": name, "lora_path": str(path), **more}
        return self.post("/v1/load_lora_adapter", fields, "admin-key")

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name}, "admin-key")

    def text(self, model: str, text: str = TEXT) -> str:
        answer = self.completion(model, text)
        return str(answer["choices"][0]["text"])

    def completion(self, model: str, text: str = TEXT) -> dict[str, Any]:
        fields = {"model": model, "prompt": text, "max_tokens": 12, "temperature": 0}
        answer: dict[str, Any] = self.post("/v1/completions", fields).json()
        return answer

    def names(self) -> dict[str, str | None]:
        listed = httpx.get(f"{self.url}/v1/models", headers={"x-api-key": "user-key"}).json()
        return {entry["id"]: entry.get("parent") for entry in listed["data"]}

    def cached(self, model: str, text: str) -> int:
        usage = self.completion(model, text)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second", "third")):
        RandomAdapter(folder / name, SHAPES, seed=seed, rank=8, size=2.0)
    RandomAdapter(folder / "dora", SHAPES, seed=9, use_dora=True)
    RandomAdapter(folder / "large", SHAPES, seed=9, rank=24)
    RandomAdapter(folder / "foreign", {"model.layers.0.mlp.up_proj": (768, 512)}, seed=9)
    pickled = folder / "pickled"
    RandomAdapter(pickled, SHAPES, seed=9)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    outside = tmp_path_factory.mktemp("outside")
    RandomAdapter(outside / "fourth", SHAPES, seed=4)
    (folder / "link").symlink_to(outside / "fourth")
    RandomAdapter(folder / "half", SHAPES, seed=4)
    (folder / "half" / "adapter_model.safetensors").unlink()
    (folder / "half" / "adapter_model.safetensors").symlink_to(
        outside / "fourth" / "adapter_model.safetensors"
    )
    keys = outside / "keys.toml"
    keys.write_text(KEYS)
    flags = ["--lora", f"first={folder / 'first'}", "--lora-folder", str(folder)]
    flags += ["--max-loras", "2", "--max-lora-rank", "16", "--api-key-file", str(keys)]
    flags += ["--dtype", "float32", "--num-pages", "128"]
    with RunningServer(*flags) as server:
        yield Served(server, folder)


@pytest.fixture
def two() -> Iterator[Setup]:
    with ExitStack() as stack:
        yield Setup(stack, STATE, STATE)


@pytest.fixture(scope="module")
def expected(served: Served) -> dict[str, str]:
    """The text of each adapter, and of the model."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    lora = {name: served.folder / name for name in ("first", "second", "third")}
    with LLM(lora=lora, dtype="float32", num_pages=128, progress=False) as llm:
        named = {name: llm.generate(TEXT, params, lora=name)[0].text for name in lora}
        return named | {BASE: llm.generate(TEXT, params)[0].text}


def test_requests_choose_an_adapter_by_its_name(served: Served, expected: dict[str, str]) -> None:
    assert len(set(expected.values())) == 4
    assert served.names() == {BASE: None, "first": BASE}
    for name in ("first", BASE):
        assert served.text(name) == expected[name]
    refused = served.post("/v1/completions", {"model": "second", "prompt": TEXT})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


def test_each_door_takes_the_name(served: Served) -> None:
    turns = [{"role": "user", "content": TEXT}]
    chat = {"messages": turns, "max_tokens": 12}

    def texts(model: str) -> list[str]:
        named = {"model": model}
        greedy = {**chat, **named, "temperature": 0}
        return [
            served.post("/v1/chat/completions", greedy).json()["choices"][0]["message"]["content"],
            served.post("/v1/messages", greedy).json()["content"][0]["text"],
            served.post("/generate", greedy).json()["text"],
            served.post(
                "/api/chat",
                {**named, "messages": turns, "stream": False,
                 "options": {"temperature": 0, "num_predict": 12}},
            ).json()["message"]["content"],
            served.post(
                "/v1/responses",
                {**named, "input": TEXT, "max_output_tokens": 12, "temperature": 0},
            ).json()["output"][-1]["content"][0]["text"],
        ]  # fmt: skip

    adapted, plain = texts("first"), texts(BASE)
    assert len(set(adapted)) == len(set(plain)) == 1
    assert adapted != plain
    assert served.post("/generate", {"text": TEXT, "model": "none"}).status_code == 404


def test_an_adapter_is_loaded_replaced_and_unloaded(
    served: Served, expected: dict[str, str]
) -> None:
    loaded = served.load("new", "second")
    assert loaded.status_code == 200, loaded.text
    assert len(loaded.json()["digest"]) == 64
    assert served.names() == {BASE: None, "first": BASE, "new": BASE}
    assert served.text("new") == expected["second"]
    assert served.load("new", served.folder / "second").status_code == 200, "the same once more"
    refused = served.load("new", "third")
    assert refused.status_code == 400
    assert "load_inplace" in refused.json()["error"]["message"]
    assert served.load("new", "third", load_inplace=True).status_code == 200
    assert served.text("new") == expected["third"]
    assert served.text("first") == expected["first"], "a third adapter took its slot meanwhile"
    assert served.unload("new").status_code == 200
    assert served.names() == {BASE: None, "first": BASE}
    assert served.unload("new").status_code == 404


def test_of_two_adapters_that_come_at_once_by_one_name_one_is_refused(served: Served) -> None:
    with ThreadPoolExecutor(2) as threads:
        loaded = threads.map(lambda path: served.load("both", path), ("second", "third"))
        assert sorted(each.status_code for each in loaded) == [200, 400]
    assert served.unload("both").status_code == 200


def test_at_the_bound_names_are_replaced_and_none_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "MAX_ADAPTERS", 1)
    model: Any = SimpleNamespace(adapters={"a": Adapter("1", "")})
    for name, is_allowed in (("a", True), ("b", False)):
        asked = LoadRequest(lora_name=name, lora_path="x", load_inplace=True)
        refused = pytest.raises(InvalidRequest, match="unload one")
        with nullcontext() if is_allowed else refused:
            lora._check_name(model, asked, Adapter("2", ""))


def test_prefixes_are_shared_within_an_adapter_only(served: Served) -> None:
    long = "Count the cats on the wall, and then the dogs below it. " * 8
    assert served.load("twin", "first").status_code == 200
    try:
        assert served.cached("first", long) == 0
        assert served.cached(BASE, long) == 0
        assert served.cached("first", long) > 64
        assert served.cached("twin", long) > 64, "another name of the same files"
    finally:
        served.unload("twin")


def test_requests_finish_with_an_adapter_that_is_unloaded(served: Served) -> None:
    assert served.load("short", "second").status_code == 200
    fields = {"model": "short", "prompt": TEXT, "max_tokens": 200, "ignore_eos": True}
    headers = {"authorization": "Bearer user-key"}
    url = f"{served.url}/v1/completions"
    with httpx.stream(
        "POST", url, json=fields | {"stream": True}, headers=headers, timeout=150
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert served.unload("short").status_code == 200
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons[-1] == "length"
    assert served.post("/v1/completions", fields).status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "status", "says"),
    [
        ("a", "../outside", 403, "below --lora-folder"),
        ("a", "/etc", 403, "below --lora-folder"),
        ("a", "link", 403, "below --lora-folder"),
        ("a", "half", 403, "below --lora-folder"),
        ("a", "none", 403, "below --lora-folder"),
        ("a", "x\0y", 403, "below --lora-folder"),
        ("a", "pickled", 400, "pickle"),
        ("a", "dora", 400, "use_dora"),
        ("a", "large", 400, "--max-lora-rank 24"),
        ("a", "foreign", 400, "another model's adapter"),
        ("a=b", "second", 400, "lora_name"),
        ("", "second", 400, "lora_name"),
        ("x", "", 403, "below --lora-folder"),
        (BASE, "second", 400, "the model's name"),
    ],
)
def test_what_is_not_loaded(served: Served, name: str, path: str, status: int, says: str) -> None:
    refused = served.load(name, path)
    assert refused.status_code == status, refused.text
    assert says in refused.json()["error"]["message"]
    assert served.names() == {BASE: None, "first": BASE}


def test_loading_needs_a_key_with_admin_rights(served: Served) -> None:
    fields = {"lora_name": "a", "lora_path": "second"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert served.post(path, fields, key="user-key").status_code == 403
        assert served.post(path, fields, key="wrong").status_code == 401


def test_a_router_gets_other_hashes_for_an_adapter(served: Served) -> None:
    def hashes(model: str) -> Any:
        headers = {"authorization": "Bearer user-key", "x-minisgl-prefix": "16"}
        fields = {"model": model, "prompt": TEXT * 4}
        answer = httpx.post(f"{served.url}/v1/completions", json=fields, headers=headers)
        return answer.json()["hashes"]

    assert hashes("first") != hashes(BASE)
    assert hashes("first") == hashes("first")


def test_streams_go_on_after_a_restart(served: Served) -> None:
    """A chat, and a text with an adapter that was loaded at run time, whose name stays. Then a
    signal during the next restart ends the server."""
    flags = ["--lora", f"first={served.folder / 'first'}", "--lora-folder", str(served.folder)]
    flags += ["--restart", "--dtype", "float32", "--num-pages", "128", "--drafts", "off"]
    common = {"max_tokens": 500, "ignore_eos": True}
    text = {**common, "model": "new", "prompt": TEXT, "temperature": 0}
    turns = [{"role": "user", "content": "Tell me a story."}]
    chat = {**common, "model": BASE, "messages": turns, "seed": 3}
    with (
        RunningServer(*flags) as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=150) as http,
    ):
        load = {"lora_name": "new", "lora_path": "second"}
        assert http.post("/load_lora_adapter", json=load).status_code == 200
        with ThreadPoolExecutor(2) as threads:
            posts = [("/completions", text), ("/chat/completions", chat)]
            whole = threads.map(lambda post: http.post(post[0], json=post[1]).json(), posts)
            written, said = (answer["choices"][0] for answer in whole)
        with (
            http.stream("POST", "/completions", json=text | {"stream": True}) as texts,
            http.stream("POST", "/chat/completions", json=chat | {"stream": True}) as chats,
        ):
            streams = [stream.iter_lines() for stream in (texts, chats)]
            begun = [read_event(next(lines)) for lines in streams]
            os.kill(server.pid("engine"), signal.SIGKILL)
            ends = ["".join(map(read_event, lines)) for lines in streams]
        assert begun[0] + ends[0] == written["text"]
        assert begun[1] + ends[1] == said["message"]["content"]
        assert "open requests that go on: 2" in server.output["err"], "it was killed in the streams"
        assert "started again after" in server.output["err"]
        again = http.post("/completions", json=text | {"max_tokens": 9})
        assert written["text"].startswith(again.json()["choices"][0]["text"])
        pids = re.findall(r"the engine is ready .* \(pid (\d+)\)", server.output["err"])
        os.kill(int(pids[-1]), signal.SIGKILL)
        server.wait_for("(?s)starting it again.*(starting it again)", "err")
        family = server.family()
        server.process.terminate()
        assert server.ended() == 0, "a signal during a restart"
        assert_nothing_left(server, family)


def read_event(line: str) -> str:
    """Return the text of a line of a stream; "" for an empty line, a comment, an error or the
    end."""
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line.removeprefix("data: ")).get("choices", [])
    return "".join(
        str(choice.get("text") or choice.get("delta", {}).get("content") or "")
        for choice in choices
    )


def test_a_router_passes_an_adapter_on_to_the_server_that_is_named(two: Setup) -> None:
    fields = {"lora_name": "a", "lora_path": "b"}
    refused = httpx.post(f"{two.url}/v1/load_lora_adapter", json=fields)
    assert refused.status_code == 400
    assert "replica" in refused.json()["error"]["message"]
    url = f"{two.url}/v1/load_lora_adapter?replica={two.name(1)}"
    assert "--lora-folder" in httpx.post(url, json=fields).json()["error"]["message"]


def test_without_a_folder_nothing_is_loaded(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        fields = {"lora_name": "a", "lora_path": str(tmp_path)}
        refused = httpx.post(f"{server.url}/v1/load_lora_adapter", json=fields)
    assert refused.status_code == 403
    assert "--lora-folder DIR" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--lora first", "NAME=PATH_OR_ID"),
        ("--lora a=DIR/none", "none"),
        ("--lora a=DIR/dora", "use_dora"),
        (f"--lora {BASE}=DIR/first", "the model's name"),
        ("--lora-folder DIR/none", "is no folder"),
        ("--lora-folder DIR --drafts mtp", "without adapters"),
        ("--lora a=DIR/first --lora a=DIR/second", "each name once"),
    ],
)
def test_wrong_flags_are_refused_before_a_process_starts(
    served: Served, flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConfigError, CheckpointError, SystemExit)) as refused:
        find_model(parse_args(flags.replace("DIR", str(served.folder)).split()))
    assert says in f"{refused.value} {capsys.readouterr().err}"


def test_another_models_adapter_ends_the_start(served: Served) -> None:
    with pytest.raises(ConfigError, match="another model's adapter"):
        LLM(lora={"a": served.folder / "foreign"}, num_pages=64, progress=False)
