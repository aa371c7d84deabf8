"""Fields that set an answer's form: what reaches the pipeline, and which are refused by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from helpers.running_server import RunningServer
from helpers.scripted_server import ScriptedServer
from minisgl.core import Accepted, Failed
from minisgl.errors import InvalidSampling
from minisgl.message import TextReply, TokenizeMsg
from minisgl.message.frontend import UserReply

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
NAMED = {"name": "n", "strict": True, "schema": SCHEMA}
JSON_SCHEMA = {"type": "json_schema", "json_schema": NAMED}
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/generate": {"text": "a"},
}
FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": JSON_SCHEMA}, {"json": TEXT}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": TEXT}),
    ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": "start: X"}}, {"grammar": "start: X"}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"guided_json": SCHEMA}, {"json": TEXT}),
    ({"guided_json": TEXT}, {"json": TEXT}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": "start: X"}, {"grammar": "start: X"}),
    ({"json_schema": SCHEMA}, {"json": TEXT}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"grammar": "start: X", "ebnf": "start: X"}, {"grammar": "start: X"}),
]


@pytest.mark.parametrize("path", PATHS)
def test_every_form_reaches_the_pipeline(
    path: str, server: ScriptedServer, http: httpx.Client
) -> None:
    for fields, option in FORMS:
        answer = http.post(path, json={**PATHS[path], **fields})
        assert answer.status_code == 200, answer.text
        assert server.received[-1].sampling.structured_outputs == option, fields


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        ({"response_format": JSON_SCHEMA, "guided_regex": "a"}, "response_format", "one form"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "not known"),
        ({"guided_json": "{"}, "guided_json", "guided_json must be JSON"),
        ({"guided_choice": []}, "guided_choice", "guided_choice must be a list"),
        ({"guided_regex": ""}, "guided_regex", "guided_regex must be a text"),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "cannot be combined with"),
        ({"guided_regex": "a" * 200_000}, "guided_regex", "at most 131072"),
        ({"regex": "a" * 200_000}, "regex", "regex has"),
        ({"ebnf": 5}, "ebnf", "ebnf"),
        ({"json_schema": "{"}, "json_schema", "json_schema must be JSON"),
        ({"guided_regex": "a", "regex": "b"}, "guided_regex", "give guided_regex or regex"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "llguidance"),
    ],
)
def test_wrong_forms(fields: dict[str, Any], param: str, says: str, http: httpx.Client) -> None:
    for path, prompt in PATHS.items():
        answer = http.post(path, json={**prompt, **fields})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert says in error["message"]


def test_the_form_of_an_answer_of_responses(server: ScriptedServer, http: httpx.Client) -> None:
    """In OpenAI's Responses the schema is one level higher."""

    def ask(**format: Any) -> httpx.Response:
        return http.post("/v1/responses", json={"input": "a", "text": {"format": format}})

    assert ask(type="json_schema", name="n", strict=True, schema=SCHEMA).status_code == 200
    assert server.received[-1].sampling.structured_outputs == {"json": TEXT}
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"items": deep}
    error = ask(type="json_schema", name="n", schema=deep).json()["error"]
    assert error["param"] == "text.format.schema"
    assert error["message"].startswith("text.format.schema has more than 100 levels")
    assert ask(type="json_schema", name="n").json()["error"]["param"] == "text.format.schema"


def test_an_error_within_a_stream_names_the_field() -> None:
    """As that of a whole answer."""

    def answer(message: TokenizeMsg, ended: threading.Event) -> Iterator[UserReply]:
        yield Accepted(uid=message.uid, num_prompt_tokens=1, sampling=message.sampling)
        yield TextReply(uid=message.uid, text="a", token_ids=[1])
        raised = InvalidSampling("structured_outputs is too hard", param="structured_outputs")
        yield Failed.of(message.uid, raised)

    with ScriptedServer(answer=answer) as server:
        chat = {**PATHS["/v1/chat/completions"], "response_format": JSON_SCHEMA}
        responses = {"input": "a", "text": {"format": {"type": "json_schema", **NAMED}}}
        for path, body, param in (
            ("chat/completions", chat, "response_format"),
            ("responses", responses, "text.format"),
        ):
            said = httpx.post(f"{server.url}/v1/{path}", json={**body, "stream": True})
            assert f"{param} is too hard" in said.text


def test_a_real_server_follows_what_pydantic_writes(builtin: RunningServer) -> None:
    """A union with a discriminator, by reference, and a format that is an annotation."""
    flag = {"type": "boolean"}
    schema: dict[str, Any] = {
        "$defs": {
            kind: {
                "type": "object",
                "properties": {"kind": {"const": kind, "type": "string"}, field: flag},
                "required": ["kind", field],
                "additionalProperties": False,
            }
            for kind, field in (("circle", "round"), ("square", "straight"))
        },
        "type": "object",
        "properties": {
            "shape": {
                "discriminator": {"propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}],
            },
            "color": {"type": "string", "format": "color", "maxLength": 5},
        },
        "required": ["shape", "color"],
        "additionalProperties": False,
    }
    with builtin.client() as client:
        asked: Any = {
            "model": "minisgl-builtin",
            "messages": [{"role": "user", "content": "A shape?"}],
            "max_tokens": 200,
        }
        named = {"name": "shape", "schema": schema}
        form = {"type": "json_schema", "json_schema": named}
        (choice,) = client.chat.completions.create(**asked, response_format=form).choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
        schema["properties"]["shape"]["oneOf"] = [{"type": "object"}, {"type": "object"}]
        with pytest.raises(openai.BadRequestError, match="must exclude one another") as raised:
            client.chat.completions.create(**asked, response_format=form)
        assert raised.value.param == "response_format.json_schema.schema.properties.shape"
