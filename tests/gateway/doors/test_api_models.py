"""The names and cards of models, /tokenize and /detokenize, CORS."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import anthropic
import httpx
import msgspec
import openai
import pytest

from helpers.scripted_server import MODEL, OTHER_NAME, ScriptedServer
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.errors import ServerBusy
from minisgl.message import ChatPrompt, TextPrompt
from minisgl.server.api.chat import ChatRequest
from minisgl.server.args import ServerArgs
from minisgl.server.model import ServedModel, find_model
from minisgl.server.site import DocumentedAPI
from minisgl.server.web.guards import Door
from minisgl_gateway import codec
from minisgl_gateway.card import ModelCard, read_card
from minisgl_gateway.codec import MAX_OPEN_BYTES, SMALL
from minisgl_gateway.keys.ring import KeyRing


def test_each_name_is_accepted(client: openai.OpenAI, server: ScriptedServer) -> None:
    assert [entry.id for entry in client.models.list()] == [MODEL, OTHER_NAME]
    assert client.models.retrieve(OTHER_NAME).id == OTHER_NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    message: Any = [{"role": "user", "content": "a"}]
    for name in (MODEL, OTHER_NAME):
        assert client.chat.completions.create(model=name, messages=message).model == name
        assert client.completions.create(model=name, prompt="a").model == name
        assert client.responses.create(model=name, input="a").model == name
        with anthropic.Anthropic(base_url=server.url, api_key="none") as claude:
            sent = claude.messages.create(model=name, max_tokens=1, messages=message)
            assert sent.model == name


def test_anthropics_client_lists_models(server: ScriptedServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none") as claude:
        listed = claude.models.list()
        assert [entry.id for entry in listed] == [MODEL, OTHER_NAME]
        assert listed.data[0].created_at.timestamp() == 1
        assert claude.models.retrieve(MODEL).display_name == MODEL


def test_names_of_a_checkpoint() -> None:
    def names(given: str | None) -> tuple[str, ...]:
        return find_model(ServerArgs(served_model_name=given)).names

    assert names(None) == ("minisgl-builtin",)
    assert names("a, b") == ("a", "b")


def test_the_card_of_the_builtin_model(client: openai.OpenAI) -> None:
    from safetensors import safe_open

    card = read_card(model_path())
    with safe_open(model_path() / "model.safetensors", "np") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 - a safetensors file does not iterate
    num = 0
    for shape in shapes:
        product = 1
        for size in shape:
            product *= size
        num += product
    assert card.num_parameters == num
    assert card.size == f"{num / 10**6:.1f}M"
    assert card.num_bytes == (model_path() / "model.safetensors").stat().st_size
    assert (card.family, card.dtype, card.quantization) == ("qwen3", "bfloat16", "")
    entry = client.models.list().data[0].model_extra
    assert entry
    assert entry["capabilities"] == ["completion"]


@pytest.mark.parametrize(
    ("template", "capabilities"),
    [
        ("{{ messages }}", []),
        ("{% if tools %}{% endif %}", ["tools"]),
        ("{% if enable_thinking %}{% endif %}", ["thinking"]),
        ([{"name": "tool_use", "template": "{{ tools }}"}], ["tools"]),
        ("{{ '<seed:think></seed:think>' }}", ["thinking"]),
        ("{{ '<|channel|>analysis<|message|><|call|>' }}", ["thinking"]),
    ],
)
def test_capabilities_follow_the_chat_template(
    tmp_path: Path, template: Any, capabilities: list[str]
) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"dtype": "float16"}}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    model = ServedModel(names=(MODEL,), defaults=SamplingParams(), folder=tmp_path)
    assert model.capabilities == ["completion", *capabilities]
    card = read_card(tmp_path)
    assert (card.num_parameters, card.num_bytes, card.dtype) == (0, 0, "float16")


def test_a_second_copy_of_the_weights_does_not_count(tmp_path: Path) -> None:
    """Mistral's repositories have consolidated.safetensors beside model.safetensors."""
    (tmp_path / "config.json").write_bytes((model_path() / "config.json").read_bytes())
    for name in ("model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).symlink_to(model_path() / "model.safetensors")
    card, own = read_card(tmp_path), read_card(model_path())
    assert (card.num_parameters, card.num_bytes) == (own.num_parameters, own.num_bytes)


def test_sizes_are_rounded() -> None:
    def size(num: int) -> str:
        texts = dict.fromkeys(("family", "dtype", "quantization", "digest"), "")
        return ModelCard(num_parameters=num, num_bytes=0, **texts).size

    assert [size(n) for n in (999, 5_000, 4_900_000, 7_615_616_512)] == [
        "999",
        "5.0K",
        "4.9M",
        "7.6B",
    ]


def test_tokenize(http: httpx.Client, server: ScriptedServer) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "a bb ccc"}).json()
    assert answer == {"count": 3, "max_model_len": None, "tokens": [1, 2, 3], "token_strs": None}
    assert server.encoded[-1] == TextPrompt(text="a bb ccc")
    chat = {"messages": [{"role": "user", "content": "a bb"}], "add_generation_prompt": False}
    assert http.post("/tokenize", json=chat).json()["tokens"] == [1, 2]
    prompt = server.encoded[-1]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == {"add_generation_prompt": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    http.post("/tokenize", json=chat | {"tools": [tool]}).raise_for_status()
    prompt = server.encoded[-1]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == [tool]
    assert http.post("/detokenize", json={"tokens": [5, 6]}).json() == {"prompt": "5 6"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_what_is_not_detokenized(http: httpx.Client, server: ScriptedServer) -> None:
    """Ids beyond the model's vocabulary, and more than are decoded in one request."""
    with server.reported(context_length=10, vocab_size=1408):
        assert http.post("/detokenize", json={"tokens": [1407]}).json() == {"prompt": "1407"}
        for tokens, why in (
            ([5, 1408, 6], "tokens must be token ids between 0 and 1407, got 1408"),
            ([5] * 65_537, "the text has 65,537 tokens, and without the model at most 65,536 are"),
        ):
            response = http.post("/detokenize", json={"tokens": tokens})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tokens")
            assert error["message"].startswith(why)


def test_a_broken_chat_template_is_none(http: httpx.Client, server: ScriptedServer) -> None:
    """The worker that compiles it says so."""
    assert http.get("/v1/models").json()["data"][0]["has_chat_template"] is True
    with server.reported(has_chat_template=False):
        assert http.get("/v1/models").json()["data"][0]["has_chat_template"] is False


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_refusals(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_a_value_that_no_message_can_hold(http: httpx.Client, path: str) -> None:
    message = {"role": "user", "content": "a"}
    tool: dict[str, Any] = {"name": "f", "input_schema": {"maximum": 2**70}}
    if path == "/tokenize":
        function = {"name": "f", "parameters": {"maximum": 2**70}}
        tool = {"type": "function", "function": function}
    response = http.post(path, json={"messages": [message], "tools": [tool]})
    assert response.status_code == 400
    assert "out of range" in response.json()["error"]["message"]


def test_the_schema_is_made_once() -> None:
    app = DocumentedAPI([ChatRequest], title="x")
    with mock.patch("msgspec.json.schema_components", wraps=msgspec.json.schema_components) as make:
        page = app.openapi()
        assert app.openapi() is page
    assert "ChatRequest" in page["components"]["schemas"]
    assert make.call_count == 1


def test_cors(http: httpx.Client) -> None:
    page = "https://page.example"
    asks = {"Origin": page, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    for origins, allowed in (((page,), page), (("*",), "*")):
        keys = KeyRing("secret", None)
        with (
            ScriptedServer(door=Door(origins=origins), keys=keys) as server,
            httpx.Client(base_url=server.url) as other,
        ):
            preflight = other.options("/v1/chat/completions", headers=asks)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == allowed
            assert "authorization" in preflight.headers["access-control-allow-headers"]
            refused = other.get("/v1/models", headers={"Origin": page})
            assert refused.status_code == 401  # and the page may read why
            assert refused.headers["access-control-allow-origin"] == allowed
    with ScriptedServer(door=Door(origins=(page,))) as server:
        other = {"Origin": "https://other.example"}
        stranger = httpx.get(f"{server.url}/v1/models", headers=other)
        assert stranger.status_code == 403
        assert "access-control-allow-origin" not in stranger.headers
    assert "access-control-allow-origin" not in http.get("/health", headers=asks).headers


def test_texts_of_a_key_wait_up_to_a_bound() -> None:
    waiting: Counter[int] = Counter()
    refused = pytest.raises(ServerBusy, match="32 MiB of your texts wait")
    with codec._counted(waiting, 1, MAX_OPEN_BYTES):
        with refused, codec._counted(waiting, 1, SMALL + 1):
            raise AssertionError
        with codec._counted(waiting, 1, SMALL), codec._counted(waiting, 2, SMALL + 1):
            pass
    assert not waiting.total()
