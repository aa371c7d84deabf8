"""Events of requests for the detokenizer, and what its replies say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minisgl.core import Accepted, Event, Finished, SamplingParams, Token
from minisgl.message import TextReply
from minisgl.message.frontend import UserReply


def acceptance(uid: int, **sampling: Any) -> Accepted:
    params = SamplingParams(max_tokens=1000, **sampling)
    return Accepted(uid=uid, num_prompt_tokens=4, sampling=params)


def ending(uid: int, num: int, reason: Any = "length", stop_match: int | None = None) -> Finished:
    return Finished(
        uid=uid,
        reason=reason,
        stop_match=stop_match,
        num_prompt_tokens=4,
        num_output_tokens=num,
        num_cached_tokens=2,
        num_chunks=3,
        queued_s=0.5,
    )


def tokens_of(uid: int, ids: Iterable[int]) -> list[Event]:
    return [Token(uid=uid, id=token) for token in ids]


def text_of(replies: Iterable[UserReply]) -> str:
    return "".join(r.text for r in replies if isinstance(r, TextReply))


def ids_of(replies: Iterable[UserReply]) -> list[int]:
    return [i for r in replies if isinstance(r, TextReply) for i in r.token_ids]
