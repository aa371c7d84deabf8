"""A server whose clients send pictures."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import pytest
from PIL import Image

from helpers.pictures import PICTURES, Sample, chat, data_url, image_part, png, text_part
from helpers.running_server import RunningServer
from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.llm import LLM

OPTIONS = ("--dtype", "float32", "--num-pages", "512", "--page-size", "4")
KEY = {"x-api-key": "none"}  # what the clients of these tests send


@pytest.fixture(scope="module")
def server(mistral3: Sample) -> Iterator[RunningServer]:
    key = KEY["x-api-key"]
    with RunningServer("--model", str(mistral3.folder), *OPTIONS, "--api-key", key) as server:
        server.url  # noqa: B018 (waits until it serves)
        yield server


def test_a_chat_about_pictures_in_two_turns(server: RunningServer) -> None:
    client = server.client()
    messages: list[Any] = chat(*PICTURES[:2])
    options: dict[str, Any] = {"model": "model", "max_tokens": 5, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **options)
    assert first.usage
    assert first.usage.prompt_tokens > 40
    timings = (first.model_extra or {})["timings"]
    assert (timings["num_images"], timings["num_images_computed"]) == (2, 2)
    assert 0 < timings["images_s"] < timings["prefill_s"]
    again = [
        *messages,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    chunks = client.chat.completions.create(
        messages=again, stream=True, stream_options={"include_usage": True}, **options
    )
    last = [chunk for chunk in chunks if chunk.usage][-1]
    timings, usage = (last.model_extra or {})["timings"], last.usage
    assert (timings["num_images"], timings["num_images_computed"], timings["images_s"]) == (2, 0, 0)
    page = httpx.get(f"{server.url}/metrics", headers=KEY).text
    assert 'minisgl_images_total{result="cached"} 2.0' in page
    assert 'minisgl_images_total{result="computed"} 2.0' in page
    assert usage.prompt_tokens_details
    assert usage.prompt_tokens_details.cached_tokens > 40


DOORS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda url, _: {
        "messages": [{"role": "user", "content": [text_part("a"), image_part(url)]}]
    },
    "/v1/responses": lambda url, _: {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    },
    "/v1/messages": lambda url, data: {
        "model": "model",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source(url, data)}]}],
    },
    "/api/chat": lambda url, data: {
        "model": "model",
        "messages": [{"role": "user", "content": "a", "images": [data or url]}],
    },
}
BAD = {
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG, JPEG, WEBP, GIF"),
    "wide": (png(100_000, 3), "100,000 x 3"),
    "cut": (base64.b64decode(data_url(PICTURES[3]).partition(",")[2])[:900], "is it whole"),
}


def source(url: str, data: str) -> dict[str, str]:
    if data:
        return {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "url", "url": url}


def _message(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("door", DOORS)
def test_a_bad_picture_is_a_400_at_each_door(server: RunningServer, door: str) -> None:
    urls = {"http://169.254.169.254/": "data: URL|base64", "file:///etc/passwd": "data: URL|base64"}
    asked = [(url, "", why) for url, why in urls.items()]
    for data, why in BAD.values():
        text = base64.b64encode(data).decode()
        asked.append((f"data:image/png;base64,{text}", text, why))
    for url, text, why in asked:
        start = time.perf_counter()
        answer = httpx.post(server.url + door, json=DOORS[door](url, text), headers=KEY, timeout=60)
        assert time.perf_counter() - start < 10  # the machine may be busy
        assert answer.status_code == 400
        assert re.search(why, answer.text)
        said, ours = _message(answer), "messages[0].content[1]"
        begin = ours if door == "/v1/chat/completions" else "images[0]"
        assert said.replace(f"{ours}.image_url.url", ours).startswith(f"{begin} ")
    assert httpx.post(server.url + door, json={}).status_code == 401


def test_prompt_ids_are_those_of_the_model(server: RunningServer) -> None:
    body = {"messages": chat(PICTURES[0]), "max_tokens": 2, "return_token_ids": True}
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers=KEY, timeout=60).json()
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
    client = ollama.Client(host=server.url, headers=KEY)
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


def test_python_sends_pictures_and_paths(mistral3: Sample, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    PICTURES[0].save(path)
    with LLM(mistral3.folder, dtype="float32", num_pages=256, progress=False) as llm:
        outputs = []
        for image in (PICTURES[0], PICTURES[0].convert("CMYK"), path, str(path)):
            parts = [{"type": "image", "image": image}, text_part("look")]
            [output] = llm.chat(
                [{"role": "user", "content": parts}], SamplingParams(max_tokens=4, temperature=0)
            )
            outputs.append((output.num_prompt_tokens, output.token_ids))
        assert outputs == [outputs[0]] * 4
        assert outputs[0][0] > 35
        svg = tmp_path / "a.svg"
        svg.write_bytes(BAD["svg"][0])
        for wrong, why in (
            ("missing.png", "No such file"),
            (7, "one of PIL"),
            (svg, "none of PNG"),
            (Image.new("L", (16_385, 90)), "a side may have 16,384"),
        ):
            parts = [{"type": "image", "image": wrong}]
            with pytest.raises(InvalidRequest, match=why):
                llm.chat([{"role": "user", "content": parts}])
