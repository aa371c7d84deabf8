"""Chat completions of the `openai` client as plain dictionaries, which tests compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk


def summed(chunks: Iterator[ChatCompletionChunk]) -> dict[str, Any]:
    """Return the sum of a stream's deltas, and the last finish_reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            message["finish_reason"] = choice.finish_reason
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                assert call.function
                if call.index == len(message["calls"]):
                    assert call.id
                    assert call.type == "function"
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments or ""
    return message


def shown(answer: ChatCompletion) -> dict[str, Any]:
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    return {
        "content": choice.message.content or "",
        "reasoning_content": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [[call.function.name, call.function.arguments] for call in calls],
        "finish_reason": choice.finish_reason,
    }
