"""docs/api.md has one row for every request field, and the row is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import ollama._types as ollama_types
import pytest
from anthropic.types import message_create_params as messages_params
from anthropic.types.beta import message_create_params as beta_messages_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.completions import CompletionRequest
from minisgl.server.api.generate import GenerateRequest
from minisgl.server.strict import Json
from minisgl_gateway.anthropic.request import MessagesRequest
from minisgl_gateway.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from minisgl_gateway.responses.request import ResponsesRequest

PAGE = Path(__file__).parents[3] / "docs/api.md"
FORMS: dict[str, type[Json]] = {
    "chat": ChatRequest,
    "text": CompletionRequest,
    "native": GenerateRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
    "ollama chat": OllamaChatRequest,
    "ollama text": OllamaGenerateRequest,
    "ollama options": OllamaOptions,
}
ROW = re.compile(r"\| `(\w+)`( \*)? \| ([a-z, ]+) \| (honoured|neutral|only) \| (.*) ?\|")


def rows() -> dict[tuple[str, str], tuple[bool, str, str]]:
    """(form, field): (whether it is marked as an extension, state, what is accepted)."""
    table: dict[tuple[str, str], tuple[bool, str, str]] = {}
    text = PAGE.read_text(encoding="utf-8").partition("| field | forms |")[2].partition("\n\n")[0]
    for line in text.splitlines()[2:]:
        found = ROW.fullmatch(line)
        assert found, line
        for form in found[3].split(", "):
            assert (form, found[1]) not in table, line
            table[form, found[1]] = (bool(found[2]), found[4], found[5])
    return table


def marks(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    """What `only` and `ignored` say about a field."""
    metas = getattr(field.type, "__metadata__", ())
    return next((meta.extra for meta in metas if getattr(meta, "extra", None)), {})


def test_the_table_has_every_field_once() -> None:
    fields = {(form, each.name) for form in FORMS for each in msgspec.structs.fields(FORMS[form])}
    assert set(rows()) == fields


@pytest.mark.parametrize("form", FORMS)
def test_the_table_says_what_the_fields_do(form: str) -> None:
    table = rows()
    for field in msgspec.structs.fields(FORMS[form]):
        _, state, accepted = table[form, field.name]
        extra = marks(field)
        assert state == ("only" if "only" in extra else "neutral" if extra else "honoured"), field
        if state == "only":
            values = [msgspec.json.encode(value).decode() for value in extra["only"]] or ["null"]
            listed = ", ".join(f"`{value}`" for value in values)
            assert accepted.strip().partition(";")[0] == listed, field.name


HEADERS = {"betas", "user_profile_id", "workspace_id"}  # which Anthropic's client sends as such


def test_the_table_has_every_field_of_the_vendors_and_marks_extensions() -> None:
    chat, text = (
        {name for kind in get_args(params.CompletionCreateParams) for name in kind.__annotations__}
        for params in (chat_params, text_params)
    )
    openai = chat | text
    anthropic = {
        name
        for params in (messages_params, beta_messages_params)
        for name in params.MessageCreateParamsBase.__annotations__
    }
    vendors = dict.fromkeys(("chat", "text", "native"), openai)
    vendors["native"] = openai - {"logprobs"}
    vendors["responses"] = {
        *responses_params.ResponseCreateParamsBase.__annotations__,
        "stream",
    }
    vendors["ollama chat"] = set(ollama_types.ChatRequest.model_fields)
    vendors["ollama text"] = set(ollama_types.GenerateRequest.model_fields)
    vendors["ollama options"] = set(ollama_types.Options.model_fields)
    vendors["messages"] = anthropic | {"stream"}
    own = {"chat": chat, "text": text, "native": set[str]()}
    missing = {
        (form, field) for form in FORMS for field in own.get(form, vendors[form]) - HEADERS
    } - rows().keys()
    assert not missing
    for (form, field), (is_extension, _, _) in rows().items():
        assert is_extension == (field not in vendors[form]), (form, field)
