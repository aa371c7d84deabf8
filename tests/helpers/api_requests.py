"""Requests to a server's API, and checks of their answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types.shared.error_object import ErrorObject

from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.message import ChatPrompt

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
CUSTOM_TOOL = {"type": "custom", "name": "patch", "description": "Edits files."}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def events(response: httpx.Response) -> list[Any]:
    """Return the data of a complete stream of server-sent events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    ErrorObject.model_validate(body["error"])
    error: dict[str, Any] = body["error"]
    assert len(error["message"]) > 15
    return error


def hello(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


def messages_of(server: ScriptedServer) -> list[dict[str, Any]]:
    """Return the chat messages of the newest request."""
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages
