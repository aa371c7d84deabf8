"""Required calls of a real server and model: one call, no more arguments than declared, and nothing
of a call's syntax in the content, wherever the answer is cut."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from helpers.chat_answers import shown, summed
from helpers.running_server import RunningServer

MODEL = "minisgl-builtin"
OPEN = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
    },
    "required": ["city", "place"],
}
FUNCTION = {"name": "weather", "description": "d", "parameters": OPEN}
TOOLS: Any = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "now"}},
]
ASK: Any = [{"role": "user", "content": "Weather in Rome?"}]
LENGTHS = (1, 2, 3, 5, 8, 12, 16, 20, 25, 30, 40)


@pytest.mark.parametrize("choice", ["required", TOOLS[0]], ids=str)
def test_one_call_with_the_declared_arguments(choice: Any, builtin: RunningServer) -> None:
    """The model wrote more properties, or more calls, until its last token."""
    chosen = choice if isinstance(choice, str) else {**choice, "function": {"name": "weather"}}
    with builtin.client() as client:
        for seed in range(6):
            asked: Any = {
                "model": MODEL,
                "messages": ASK,
                "tools": TOOLS,
                "tool_choice": chosen,
                "max_tokens": 400,
                "seed": seed,
                "temperature": 1,
            }
            answer = shown(client.chat.completions.create(**asked))
            assert answer["finish_reason"] == "tool_calls"
            [(name, arguments)] = answer["calls"]
            given = json.loads(arguments)
            assert given.keys() == ({"city", "place"} if name == "weather" else set())
            assert not given or given["place"].keys() == {"x"}
            streamed = summed(client.chat.completions.create(**asked, stream=True))
            assert streamed == answer


def test_a_cut_chat_has_no_syntax_in_its_content(builtin: RunningServer) -> None:
    with builtin.client() as client:
        for fields in [
            *({"max_tokens": most} for most in LENGTHS),
            {"stop": "name"},
            {"stop": ":"},
        ]:
            asked: Any = {
                "model": MODEL,
                "messages": ASK,
                "tools": TOOLS,
                "tool_choice": "required",
                **fields,
                "seed": 1,
            }
            whole = client.chat.completions.create(**asked)
            answer = shown(whole)
            assert answer["content"] == "", fields
            assert answer["finish_reason"] != "tool_calls" or answer["calls"]
            assert summed(client.chat.completions.create(**asked, stream=True)) == answer


def test_a_cut_response_has_no_syntax_in_its_text(builtin: RunningServer) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    with builtin.client() as client:
        for most in LENGTHS:
            asked: Any = {
                "model": MODEL,
                "input": "Weather in Rome?",
                "tools": tools,
                "tool_choice": "required",
                "max_output_tokens": most,
                "store": False,
            }
            answer = client.responses.create(**asked)
            assert answer.output_text == ""
            kinds = {event.type for event in client.responses.create(**asked, stream=True)}
            assert "response.output_text.delta" not in kinds


def test_a_cut_message_has_no_syntax_in_its_text(builtin: RunningServer) -> None:
    tools: Any = [{"name": "weather", "input_schema": OPEN}]
    with anthropic.Anthropic(base_url=builtin.url, api_key="none", max_retries=0) as claude:
        for most in LENGTHS:
            asked: Any = {
                "model": MODEL,
                "messages": ASK,
                "tools": tools,
                "max_tokens": most,
                "tool_choice": {"type": "any"},
            }
            answer = claude.messages.create(**asked)
            assert {block.type for block in answer.content} <= {"tool_use"}
            events = list(claude.messages.create(**asked, stream=True))
            assert "text_delta" not in str(events)


def test_a_grammar_that_becomes_too_much_work_ends_the_answer(builtin: RunningServer) -> None:
    """Its request failed with a 400 in the middle of its stream."""
    with builtin.client() as client:
        asked: Any = {
            "model": MODEL,
            "messages": ASK,
            "max_tokens": 20,
            "extra_body": {"guided_regex": "(a?){5000}a{5000}"},
        }
        answer = shown(client.chat.completions.create(**asked))
        assert (answer["content"], answer["finish_reason"]) == ("a", "length")
        assert summed(client.chat.completions.create(**asked, stream=True)) == answer
