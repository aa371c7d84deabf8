"""Anthropic's Messages as the official client sees them, over a scripted pipeline."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from helpers.scheduling import add, make
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.builtin import model_path
from minisgl.core import Accepted, Failed, Finished
from minisgl.errors import PromptTooLong
from minisgl.message import ChatPrompt, TextPrompt, TextReply, TokenizeMsg
from minisgl.message.frontend import UserReply
from minisgl.server.errors import rename
from minisgl.server.web.errors import error_body
from minisgl.tokenizer import PromptEncoder, load_tokenizer
from minisgl_gateway.anthropic.routes import NAMES
from minisgl_gateway.error_forms import anthropic_error

PATH = "/v1/messages"
IMAGE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def claude(server: ScriptedServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def turn(text: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def asked(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": list(turns), **fields}


def received(server: ScriptedServer) -> ChatPrompt:
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_whole_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**asked(turn("one two three four")))
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "one two three four ."
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == 2
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.output_tokens == 4
    assert message.model_extra
    assert message.model_extra["timings"]["num_chunks"] == 3


def test_stop_reasons(claude: anthropic.Anthropic, server: ScriptedServer) -> None:
    cut = claude.messages.create(**asked(turn("one two three"), max_tokens=2))
    assert cut.stop_reason == "max_tokens"
    stopped = claude.messages.create(**asked(turn("one END two"), stop_sequences=["END"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert stopped.content[0].model_dump()["text"] == "one "
    empty = claude.messages.create(**asked(turn("END"), stop_sequences=["END"]))
    assert empty.content == []
    assert server.received[-1].is_clamped


def test_a_context_that_is_full_is_not_max_tokens() -> None:
    """The scripted pipeline cannot fill a context, so its end reports one of 9 tokens."""

    def answer(message: TokenizeMsg, resumed: threading.Event) -> Iterator[UserReply]:
        uid = message.uid
        yield Accepted(uid=uid, num_prompt_tokens=1, sampling=message.sampling)
        yield TextReply(uid=uid, text="one", token_ids=[1])
        yield Finished(uid=uid, reason="length", num_prompt_tokens=1, num_output_tokens=1)

    with ScriptedServer(answer=answer) as server:
        body = asked(turn("a"), max_tokens=9)
        message = httpx.post(f"{server.url}{PATH}", json=body).json()
        assert message["stop_reason"] == "model_context_window_exceeded"


def test_a_stream_adds_up_to_the_whole_message(claude: anthropic.Anthropic) -> None:
    for text in ("one 二 \U0001f600", "END"):
        request = asked(turn(text), stop_sequences=["END"])
        with claude.messages.stream(**request) as stream:
            streamed = stream.get_final_message()
        whole = claude.messages.create(**request)
        assert [b.text for b in streamed.content if b.type == "text"] == [
            b.text for b in whole.content if b.type == "text"
        ]
        assert streamed.stop_reason == whole.stop_reason
        assert streamed.stop_sequence == whole.stop_sequence
        assert streamed.usage == whole.usage
    raw = claude.messages.create(**asked(turn("one two")), stream=True)
    kinds = [event.type for event in raw]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_frames_of_a_stream(http: httpx.Client) -> None:
    response = http.post(PATH, json=asked(turn("one"), stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    for frame in frames:
        first, second = frame.split("\n")
        name = first.removeprefix("event: ")
        assert second.startswith("data: {")
        assert f'"type":"{name}"' in second
    assert '"input_tokens":1' in frames[0]


def test_turns_become_messages_of_a_chat(
    claude: anthropic.Anthropic, server: ScriptedServer
) -> None:
    cache: Any = {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": [1, "é"]}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    claude.beta.messages.create(
        **asked(
            turn([{"type": "text", "text": "one", **cache}, {"type": "text", "text": "two"}]),
            turn("three"),
            turn(
                [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I call"},
                ],
                role="assistant",
            ),
            turn([{"type": "thinking", "thinking": "so", "signature": "s"}, use], role="assistant"),
            turn(
                [
                    {**result, "content": [{"type": "text", "text": "42"}]},
                    {**result, "content": "no", "is_error": True},
                    {**result},
                    {"type": "text", "text": "and now?"},
                ]
            ),
            system=[{"type": "text", "text": "be brief", **cache}, {"type": "text", "text": "ok"}],
            cache_control={"type": "ephemeral"},
            metadata={"user_id": "u"},
            thinking={"type": "disabled"},
            betas=["no-such-beta-2031-01-01"],
        )
    )
    prompt = received(server)
    call = {"id": "t1", "type": "function", "function": {"name": "f"}}
    call["function"] |= {"arguments": '{"a":[1,"é"]}'}
    assert prompt.messages == [
        {"role": "system", "content": "be brief\nok"},
        {"role": "user", "content": "one\ntwo\nthree"},
        {
            "role": "assistant",
            "content": "I call",
            "reasoning_content": "hm\nso",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "42", "tool_call_id": "t1"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t1"},
        {"role": "user", "content": "and now?"},
    ]
    assert prompt.template_args == {"enable_thinking": False}


def test_a_final_turn_of_the_assistant_is_continued(
    claude: anthropic.Anthropic, server: ScriptedServer
) -> None:
    claude.messages.create(**asked(turn("one"), turn("It is", role="assistant")))
    assert received(server).template_args == {"continue_final_message": True}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    called = turn([{"type": "text", "text": "I call"}, use], role="assistant")
    claude.messages.create(**asked(turn("one"), called))
    assert received(server).template_args == {}, "its text has ended"
    for nothing in ("", []):
        claude.messages.create(**asked(turn("one"), turn(nothing, role="assistant")))
        assert received(server) == ChatPrompt(messages=[turn("one")], is_split=True)


def test_tokens_are_counted(claude: anthropic.Anthropic, server: ScriptedServer) -> None:
    request = asked(turn("one two three"), system="be brief")
    del request["max_tokens"]
    assert claude.messages.count_tokens(**request).input_tokens == 3
    claude.messages.create(**request, max_tokens=5)
    assert server.encoded[-1] == server.received[-1].prompt


def test_sampling(claude: anthropic.Anthropic, server: ScriptedServer) -> None:
    claude.messages.create(
        **asked(turn("one"), stop_sequences=["x"], max_tokens=7),
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 9},
    )
    sampling = server.received[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 9)
    assert (sampling.max_tokens, sampling.stop) == (7, ("x",))


def test_the_form_of_the_answer(claude: anthropic.Anthropic, server: ScriptedServer) -> None:
    schema = {"type": "object"}
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    claude.messages.create(**asked(turn("a"), output_config=output))
    assert server.received[-1].sampling.structured_outputs == {"json": '{"type":"object"}'}
    older: Any = {"output_format": {"type": "json_schema", "schema": {"type": "array"}}}
    claude.messages.create(**asked(turn("a")), extra_body=older)
    assert server.received[-1].sampling.structured_outputs == {"json": '{"type":"array"}'}
    older["output_format"]["schema"] = {"type": "array", "items": {"a": "b" * 200_000}}
    with pytest.raises(anthropic.BadRequestError, match=r"'param': 'output_format\.schema'"):
        claude.messages.create(**asked(turn("a")), extra_body=older)
    with pytest.raises(anthropic.BadRequestError, match="mean the same and differ"):
        claude.messages.create(**asked(turn("a"), output_config=output), extra_body=older)
    output["effort"] = "low"
    with server.templated("{{ reasoning_effort }}"):
        claude.messages.create(**asked(turn("a"), output_config=output))
    assert received(server).template_args == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type must be custom"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema is missing"),
        ({"tools": [TOOL | {"allowed_callers": ["code"]}]}, "allowed_callers"),
        ({"tools": [TOOL | {"name": "a b"}]}, r"tools\[0\].name: expected a string matching"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "may be any, auto, none or tool"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"messages": []}, "messages"),
        ({"messages": [turn([{"type": "image", "source": IMAGE}])]}, "has images"),
        ({"messages": [turn("x", role="tool")]}, "role.* may be assistant, system or user"),
        (
            {"messages": [turn([{"type": "tool_use", "id": "t", "name": "f", "input": {}}])]},
            r"messages\[0\].content\[0\]: only the assistant has tool_use",
        ),
        ({"nonsense": 1}, "nonsense is not known"),
    ],
)
def test_refusals_in_anthropics_form(
    claude: anthropic.Anthropic, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=match) as raised:
        claude.messages.create(
            model=MODEL,
            max_tokens=1,
            messages=[{"role": "user", "content": "a"}],
            extra_body=fields,
        )
    body = raised.value.body
    assert isinstance(body, dict)
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "says"),
    [
        (60, None, r"^prompt is too long: 60 tokens > 60 \(the field messages has 60 tokens, but"),
        (50, 11, r"^input length and `max_tokens` exceed context limit: 50 \+ 11 > 60 \(.*at most"),
    ],
)
def test_claude_code_knows_refusals_by_their_words(
    num_prompt: int, max_tokens: int | None, says: str
) -> None:
    """It compacts the chat, or asks again for the tokens that are left."""
    refused = add(make(max_seq_len=60), 0, [1] * num_prompt, max_tokens=max_tokens)
    assert isinstance(refused, Failed)
    assert re.search(says, said(refused.to_error()))


def test_claude_code_knows_that_a_prompt_is_far_too_long() -> None:
    encoder = PromptEncoder(tokenizer=load_tokenizer(model_path()), folder=model_path())
    with pytest.raises(PromptTooLong) as raised:
        encoder.encode(TextPrompt(text="a b " * 9000), 2048)
    assert re.search(r"^prompt is too long: \d+ tokens > 2048 \(", said(raised.value))


def said(error: Exception) -> str:
    """Return the message that Anthropic's form has for an error of a worker."""
    assert isinstance(error, PromptTooLong)
    rename(error, NAMES)
    return anthropic_error(error_body(error)[1]).error.message


def test_other_errors_in_anthropics_form(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.messages.create(**asked(turn("a")) | {"model": "other"})
    assert http.get("/v1/messages/batches").json()["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.InternalServerError, match="out of luck"):
        claude.messages.create(**asked(turn("!fail")))
    with (
        pytest.raises(anthropic.APIStatusError, match="out of luck"),
        claude.messages.stream(**asked(turn("one !fail"))) as stream,
    ):
        list(stream)
    late = http.post("/v1/messages", json=asked(turn("!wait")) | {"timeout": 0.1})
    error = anthropic.types.ErrorResponse.model_validate(late.json()).error
    assert (late.status_code, error.type) == (504, "timeout_error")


def test_tools_that_must_not_be_called_stay_out_of_the_prompt(
    claude: anthropic.Anthropic, server: ScriptedServer
) -> None:
    claude.messages.create(**asked(turn("a"), tools=[TOOL], tool_choice={"type": "none"}))
    assert received(server).tools == []


def test_tools(claude: anthropic.Anthropic, server: ScriptedServer) -> None:
    choices: Any = [
        (None, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "any"}, "required", False),
        ({"type": "tool", "name": "f"}, "f", False),
    ]
    for choice, expected, is_parallel in choices:
        fields = {"tool_choice": choice} if choice else {}
        claude.messages.create(**asked(turn("a"), tools=[TOOL], **fields))
        prompt = received(server)
        function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
        assert prompt.tools == [{"type": "function", "function": function}]
        assert (prompt.tool_choice, prompt.parallel_tool_calls) == (expected, is_parallel)


SPLIT = (
    "!part:reasoning:hm !part:reasoning:so !part:content:I !part:content:call !part:call:f "
    '!part:arguments:{"a": !part:arguments:1} !part:call:g !part:arguments:{}'
)


def test_thinking_text_and_calls_are_blocks(claude: anthropic.Anthropic) -> None:
    request = asked(turn(SPLIT), tools=[TOOL])
    whole = claude.messages.create(**request)
    blocks = [block.model_dump(exclude={"id"}) for block in whole.content]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "hmso"
    assert blocks[1]["text"] == "Icall"
    assert [(block["name"], block["input"]) for block in blocks[2:]] == [("f", {"a": 1}), ("g", {})]
    assert whole.stop_reason == "tool_use"
    with claude.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    same = [block.model_dump(exclude={"id", "parsed_output"}) for block in streamed.content]
    assert same == blocks
    assert streamed.stop_reason == "tool_use"
    request["thinking"] = {"type": "adaptive", "display": "omitted"}
    with claude.messages.stream(**request) as stream:
        for answer in (claude.messages.create(**request), stream.get_final_message()):
            assert answer.content[0].model_dump()["thinking"] == ""
            assert answer.content[1].model_dump()["text"] == "Icall"
    ids = [block.id for block in streamed.content if block.type == "tool_use"]
    assert len(set(ids)) == 2


def test_a_tool_runner_goes_on_without_a_thread(claude: anthropic.Anthropic) -> None:
    """The client asks for one first, which is refused in the words by which it does without."""

    @anthropic.beta_tool
    def f(a: int) -> str:
        """Add one."""
        return f"it is {a + 1}"

    first = '!part:call:f !part:arguments:{"a":4}'
    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, tools=[f], messages=[{"role": "user", "content": first}]
    )
    assert [message.content[0].type for message in runner] == ["tool_use", "text"]
    (text,) = runner.until_done().content
    assert text.type == "text"
    assert text.text == "it is 5 ."


def test_arguments_that_are_not_an_object(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        **asked(turn("!part:call:f !part:arguments:{oops"), tools=[TOOL])
    )
    (block,) = answer.content
    assert block.type == "tool_use"
    assert block.input == {"arguments": "{oops"}


def test_thinking(claude: anthropic.Anthropic, server: ScriptedServer) -> None:
    options: Any = [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}, 1024),
        ({"type": "disabled"}, {"enable_thinking": False}, None),
        ({"type": "adaptive"}, {}, None),
    ]
    for thinking, args, budget in options:
        with server.templated("<think></think>"):
            claude.messages.create(**asked(turn("a"), thinking=thinking))
        assert (received(server).template_args, received(server).thinking_budget) == (args, budget)
