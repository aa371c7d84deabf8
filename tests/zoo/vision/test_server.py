"""A server whose clients send pictures."""

from __future__ import annotations

import base64
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import pytest

from helpers.pictures import PICTURES, Sample, chat, data_url, image_part, text_part
from helpers.running_server import RunningServer
from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.llm import LLM

OPTIONS = ("--dtype", "float32", "--num-pages", "512", "--page-size", "4", "--restart")


@pytest.fixture(scope="module")
def server(mistral3: Sample) -> Iterator[RunningServer]:
    with RunningServer("--model", str(mistral3.folder), *OPTIONS) as server:
        server.url  # noqa: B018 (waits until it serves)
        yield server


def test_a_chat_about_pictures_in_two_turns(server: RunningServer) -> None:
    client = server.client()
    messages: list[Any] = chat(*PICTURES[:2])
    options: dict[str, Any] = {"model": "model", "max_tokens": 5, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **options)
    assert first.usage
    assert first.usage.prompt_tokens > 40
    again = [
        *messages,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    chunks = client.chat.completions.create(
        messages=again, stream=True, stream_options={"include_usage": True}, **options
    )
    usage = [chunk.usage for chunk in chunks if chunk.usage][-1]
    assert usage.prompt_tokens_details
    assert usage.prompt_tokens_details.cached_tokens > 40


def test_a_bad_picture_is_a_400_by_its_name(server: RunningServer) -> None:
    parts = [text_part("a"), image_part("data:image/png;base64,aGVsbG8=")]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    start = time.perf_counter()
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert time.perf_counter() - start < 10  # the machine may be busy
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1]"
    assert "none of PNG, JPEG, WEBP, GIF" in error["message"]


def test_prompt_ids_are_those_of_the_model(server: RunningServer) -> None:
    body = {"messages": chat(PICTURES[0]), "max_tokens": 2, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    ids = answer["prompt_token_ids"]
    assert len(ids) == answer["usage"]["prompt_tokens"]
    assert max(ids) < 2**20


def test_openai_sends_a_tools_picture(server: RunningServer) -> None:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "camera", "arguments": "{}"},
    }
    messages: list[Any] = [
        *chat(PICTURES[0]),
        {"role": "assistant", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "abcdefghi",
            "content": [text_part("seen: "), image_part(data_url(PICTURES[1]))],
        },
    ]
    options: dict[str, Any] = {"model": "model", "max_tokens": 3, "temperature": 0}
    answer = server.client().chat.completions.create(messages=messages, **options)
    without = server.client().chat.completions.create(messages=messages[:2], **options)
    assert answer.usage
    assert without.usage
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 15


def test_responses_sends_pictures(server: RunningServer) -> None:
    url = data_url(PICTURES[0])
    picture = {"type": "input_image", "image_url": url, "detail": "auto"}
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, picture]},
        {"type": "function_call", "call_id": "abcdefghi", "name": "camera", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": [picture]},
    ]
    raw = server.client().responses.with_raw_response.create(
        model="model", input=items, max_output_tokens=3
    )
    assert "x-minisgl-warning" not in raw.headers
    usage = raw.parse().usage
    assert usage
    assert usage.input_tokens > 70


def test_anthropic_sends_pictures(server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    data = data_url(PICTURES[0]).partition(",")[2]
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }
    messages: list[Any] = [
        {"role": "user", "content": [block, {"type": "text", "text": "look"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "abcdefghi", "name": "camera", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": [block]}],
        },
    ]
    answer = client.messages.create(model="model", messages=messages, max_tokens=3)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 70


def test_ollama_sends_pictures(server: RunningServer) -> None:
    client = ollama.Client(host=server.url)
    data = base64.b64decode(data_url(PICTURES[0]).partition(",")[2])
    call = {"function": {"name": "camera", "arguments": {}}}
    messages = [
        {"role": "user", "content": "look", "images": [data]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "images": [data], "tool_name": "camera"},
    ]
    answer = client.chat(model="model", messages=messages, options={"num_predict": 3})
    assert (answer.prompt_eval_count or 0) > 70
    whole = client.generate(model="model", prompt="look", images=[data], options={"num_predict": 3})
    assert (whole.prompt_eval_count or 0) > 35
    assert "vision" in (client.show("model").capabilities or ())


def test_a_chat_about_pictures_goes_on_after_a_restart(server: RunningServer) -> None:
    """In the same words. An answer that was complete before the engine ended is asked for again."""
    options: dict[str, Any] = {"model": "model", "max_tokens": 700, "seed": 3, "stream": True}
    options["extra_body"] = {"ignore_eos": True}

    def answer(kills: bool = False) -> tuple[str, Any]:
        words, timings = "", None
        for chunk in server.client().chat.completions.create(
            messages=chat(*PICTURES[:2]),  # type: ignore[arg-type] (plain dicts)
            **options,
        ):
            words += "".join(choice.delta.content or "" for choice in chunk.choices)
            timings = (chunk.model_extra or {}).get("timings") or timings
            if kills and words:
                os.kill(last_pid(server), signal.SIGKILL)
                kills = False
        return words, timings

    words, _ = answer()
    for _ in range(3):
        again, timings = answer(kills=True)
        assert again == words
        if timings.get("resumed"):
            return
    raise AssertionError("each answer was complete before its engine was killed")


def last_pid(server: RunningServer) -> int:
    return int(re.findall(r"the engine is ready .* \(pid (\d+)\)", server.output["err"])[-1])


def test_python_sends_pictures_and_paths(mistral3: Sample, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    PICTURES[0].save(path)
    with LLM(mistral3.folder, dtype="float32", num_pages=256, progress=False) as llm:
        outputs = []
        for image in (PICTURES[0], path, str(path)):
            parts = [{"type": "image", "image": image}, text_part("look")]
            [output] = llm.chat(
                [{"role": "user", "content": parts}], SamplingParams(max_tokens=4, temperature=0)
            )
            outputs.append((output.num_prompt_tokens, output.token_ids))
        assert outputs[0] == outputs[1] == outputs[2]
        assert outputs[0][0] > 35
        for wrong, why in (("missing.png", "No such file"), (7, "one of PIL")):
            parts = [{"type": "image", "image": wrong}]
            with pytest.raises(InvalidRequest, match=why):
                llm.chat([{"role": "user", "content": parts}])
