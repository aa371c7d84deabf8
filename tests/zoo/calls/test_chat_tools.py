"""`LLM.chat` with tools, on the built-in model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl import LLM, AsyncLLM, Delta, RequestOutput, SamplingParams
from minisgl.core.answer import collect
from minisgl.errors import InvalidRequest, RequestError

ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS},
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, num_pages=256) as llm:
        yield llm


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_a_required_call(llm: LLM, choice: Any) -> None:
    tools = [TOOL] if choice == "required" else [OTHER, TOOL]
    first, second = llm.chat(
        [ASK, ASK[:]], SamplingParams(max_tokens=400, seed=5), tools=tools, tool_choice=choice
    )
    for output in (first, second):
        assert output.tool_calls
        assert all(call.name == "weather" for call in output.tool_calls)
        arguments = json.loads(output.tool_calls[0].arguments)
        assert arguments in ({"city": "Rome"}, {"city": "Oslo"})
        # A model that must call may call again and again; what max_tokens cuts in two is text.
        assert output.text == "" or (choice == "required" and output.finish_reason == "length")


def test_a_stream_adds_up_to_the_answer(llm: LLM) -> None:
    """The deltas' parts are those that the server's clients get, and make the last output."""
    params = SamplingParams(max_tokens=400, seed=5)
    for choice in ("required", "auto"):
        (whole,) = llm.chat(ASK, params, tools=[TOOL], tool_choice=choice)
        *deltas, last = llm.stream(ASK, params, tools=[TOOL], tool_choice=choice)
        parts = [part for delta in deltas if isinstance(delta, Delta) for part in delta.parts]
        assert isinstance(last, RequestOutput)
        for output in (last, collect(parts)):
            text = output.text if isinstance(output, RequestOutput) else output.content
            calls = output.tool_calls if isinstance(output, RequestOutput) else output.calls
            assert (text, calls, output.reasoning) == (whole.text, whole.tool_calls, "")
        assert "".join(delta.text for delta in deltas) == whole.text
    with pytest.raises(InvalidRequest, match="tools is for chat templates"):
        llm.stream("a", tools=[TOOL])


def test_asyncio() -> None:
    async def run() -> None:
        params = SamplingParams(max_tokens=400, seed=5)
        async with AsyncLLM(progress=False, num_pages=256) as llm:
            kinds, last = set(), None
            weather = {"type": "function", "function": {"name": "weather"}}
            async for last in llm.chat(ASK, params, tools=[TOOL], tool_choice=weather):
                kinds |= {kind for kind, _ in getattr(last, "parts", ())}
            assert kinds == {"call", "arguments"}
            assert isinstance(last, RequestOutput)
            assert last.tool_calls[0].name == "weather"

    asyncio.run(run())


def test_without_a_call_the_text_is_the_answer(llm: LLM) -> None:
    (plain,) = llm.chat(ASK, GREEDY)
    for tools, choice in (([TOOL], "none"), ([], "auto")):
        (output,) = llm.chat(ASK, GREEDY, tools=tools, tool_choice=choice)
        assert (output.text, output.tool_calls, output.reasoning) == (plain.text, [], "")
    (offered,) = llm.chat(ASK, GREEDY, tools=[TOOL])
    assert offered.num_prompt_tokens > plain.num_prompt_tokens


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tool_choice": "required"}, "tool_choice needs it"),
        ({"tools": "weather"}, "tools must be a list"),
        ({"tools": [{"name": "weather"}]}, r"tools\[0\] must be like"),
        ({"tools": [{"function": {"name": "a b"}}]}, r"tools\[0\].function.name must have"),
        ({"tools": [{"function": {"name": "a", "parameters": 1}}]}, "must be a JSON schema"),
        ({"tools": [{"function": {"name": "a", "colour": 1}}]}, "has no field colour"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice must be"),
        ({"tools": [TOOL, TOOL]}, "two tools have the same name"),
        (
            {"tools": [TOOL], "tool_choice": {"function": {"name": "x"}}},
            "tool_choice names 'x', and no tool has that name",
        ),
    ],
)
def test_wrong_arguments_are_refused(llm: LLM, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        llm.chat(ASK, GREEDY, **options)


def test_options_that_exclude_each_other(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs cannot be combined with tools"):
        llm.chat(ASK, SamplingParams(max_tokens=1, prompt_logprobs=0), tools=[TOOL])
