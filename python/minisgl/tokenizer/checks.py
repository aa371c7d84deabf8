"""Makes the record for the scheduler of a new request, in two parts: its prompt, its grammar."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from minisgl.core import Failed
from minisgl.message import ChatPrompt, TokenizeMsg, UserMsg
from minisgl.tokenizer.tokenize import PromptEncoder

Finish = Callable[[], UserMsg | Failed]


def begin(encoder: PromptEncoder, message: TokenizeMsg) -> Finish:
    """Encode the prompt. Returns a function that checks the grammar, and then returns the record
    for the scheduler, or the refusal for the client."""
    uid = message.uid
    try:
        encoded = encoder.encode(message.prompt, message.context_length)
    except Exception as error:
        failed = Failed.of(uid, error)
        return lambda: failed

    def finish() -> UserMsg | Failed:
        try:
            rest = (message.sampling, message.namespace, uid, message.priority)
            request = encoder.request(encoded, *rest)
            request = msgspec.structs.replace(
                request, share=message.share, returns_ids=message.returns_ids
            )
            return _clamped(message, request)
        except Exception as error:
            return Failed.of(uid, error)

    return finish


def has_grammar(message: TokenizeMsg) -> bool:
    """Whether the request has a grammar that must be checked."""
    if message.sampling.structured_outputs is not None:
        return True
    prompt = message.prompt
    return isinstance(prompt, ChatPrompt) and (
        prompt.tool_choice != "auto" or prompt.thinking_budget is not None
    )


def _clamped(asked: TokenizeMsg, message: UserMsg) -> UserMsg:
    """Return `message`. If `asked` allows it, its `max_tokens` is at most what the context
    leaves."""
    wanted = asked.sampling.max_tokens
    if not asked.is_clamped or not wanted or not asked.context_length:
        return message
    left = max(asked.context_length - len(message.ids) // 4, 1)
    sampling = msgspec.structs.replace(message.sampling, max_tokens=min(wanted, left))
    return msgspec.structs.replace(message, sampling=sampling)
