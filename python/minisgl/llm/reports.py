"""The fields of an answer besides text and ids: log-probabilities, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.core.answer import collect
from minisgl.message import TextReply, TokenText


def reports(replies: Sequence[TextReply], in_parts: bool) -> dict[str, Any]:
    """Return the fields that the request asks for: of `RequestOutput`, or of `Delta` if
    `in_parts`."""
    fields: dict[str, Any] = {}
    if logprobs := [logprob for reply in replies for logprob in reply.logprobs or ()]:
        fields["logprobs"] = logprobs
        if any(tops := [_top(token) for reply in replies for token in reply.tokens]):
            fields["top_logprobs"] = tops
    if prompt := [token for reply in replies for token in reply.prompt]:
        fields["prompt_logprobs"] = [token.logprob for token in prompt]
        if any(tops := [_top(token) for token in prompt]):
            fields["prompt_top_logprobs"] = tops
    parts = [part for reply in replies for part in reply.parts]
    if in_parts:
        fields["parts"] = parts
    elif parts:
        answer = collect(parts)
        fields |= {"reasoning": answer.reasoning, "tool_calls": answer.calls}
    return fields


def _top(token: TokenText) -> dict[int, float]:
    return {id: logprob for id, _, logprob in token.top}
